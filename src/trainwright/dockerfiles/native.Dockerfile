FROM @base_image@
# trainwright's own backend. torch's package brings CUDA along; the machine brings the driver.
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Where Google's machines mount the driver, and what NVIDIA's runtime asks images for.
ENV PATH=/usr/local/nvidia/bin:${PATH} LD_LIBRARY_PATH=/usr/local/nvidia/lib64
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/trainwright
COPY requirements.txt constraints.txt ./
RUN python3 -m pip install --requirement requirements.txt --constraint constraints.txt
COPY trainwright ./trainwright
# A .pth file, since PYTHONPATH is the user's to set.
RUN python3 -c "import site; open(site.getsitepackages()[0] + '/trainwright.pth', 'w').write('/opt/trainwright\n')" \
 && cd / && python3 -c "import trainwright.backends.native.train"
WORKDIR /

FROM @base_image@
# NVIDIA NeMo, and the Cloud SDK by which nodes copy data. Nothing of ours is in it: the worker travels with the run.
ENV PYTHONUNBUFFERED=1
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /
# gcloud, for `gcloud storage rsync`; apt trusts Google's key for this one repository only. No version of it is named:
# what a run needs has been in gcloud for years, and an old version without its security fixes helps nobody.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates curl gnupg \
 && curl --fail --silent --show-error --location --retry 3 https://packages.cloud.google.com/apt/doc/apt-key.gpg \
    | gpg --dearmor --output /usr/share/keyrings/cloud.google.gpg \
 && echo "deb [signed-by=/usr/share/keyrings/cloud.google.gpg] https://packages.cloud.google.com/apt cloud-sdk main" \
    > /etc/apt/sources.list.d/google-cloud-sdk.list \
 && apt-get update \
 && apt-get install --yes --no-install-recommends google-cloud-cli \
 && rm -rf /var/lib/apt/lists/*

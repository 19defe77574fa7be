"""The container images of jobs on Vertex AI: what they are built from, and their names, which are made of the content.

Dockerfiles lie in dockerfiles/, here and not beside the launcher, since backends must know the name of their image.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import requires, version
from pathlib import Path

from trainwright.config import RunConfig
from trainwright.config_backend import NativeBackend, NemoBackend
from trainwright.errors import UserError
from trainwright.places import CONSTRAINTS

_HAVE_IMAGES = (NativeBackend, NemoBackend)
_PACKAGE = Path(__file__).parent
_DOCKERFILE, _IGNORE = "Dockerfile", ".gcloudignore"
_LEFT_OUT = ("__pycache__", "conf", "experiments", CONSTRAINTS.name)  # of the package: nodes compose nothing
_LATEST = "latest"
# Cloud Build: NeMo's image alone is some 20 GB to pull, to unpack and to push; the default disk has 100 GB.
_BUILD_OPTIONS = ("--timeout=2h", "--machine-type=e2-highcpu-8", "--disk-size=200")


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image and all that it is built from."""

    name: str  # with repository and tag
    files: Mapping[str, bytes]  # the build context, by path


def image_of(config: RunConfig) -> str | None:
    """Return the image of a run's jobs: the user's, or on Vertex AI the one that we build; else None, the bare host."""
    backend = config.backend
    if not isinstance(backend, _HAVE_IMAGES):
        return None
    if backend.image is not None or config.launcher.kind != "vertex":
        return backend.image
    return _name(config)


def to_build(config: RunConfig) -> Image:
    """Return the image that runs of this backend use on Vertex AI unless they name another.

    Raises UserError where the backend has none, its base may change under its name, or the site does not say enough.
    """
    backend = config.backend
    if not isinstance(backend, _HAVE_IMAGES):
        raise UserError(f"backend={backend.kind}: it has no container image; images are for backend=nemo and native")
    problems = [*_problems_of_base(backend.base_image), *_problems_of_site(config)]
    if problems:
        raise UserError("\n".join(problems))
    files = _files(backend.kind, backend.base_image)
    labels = {
        "org.opencontainers.image.title": f"trainwright-{backend.kind}",
        "org.opencontainers.image.version": version("trainwright"),
        "org.opencontainers.image.base.name": backend.base_image,
        "trainwright.content": _digest(backend.kind, backend.base_image),
    }
    # Labels stand outside of the digest: a new version of ours that changes nothing in the image needs no new build.
    files[_DOCKERFILE] += "".join(f'LABEL {key}="{value}"\n' for key, value in labels.items()).encode()
    # gcloud makes itself a list of what not to send where there is a .gitignore further up; this says: nothing.
    files[_IGNORE] = b"# all that is here is needed\n"
    return Image(name=_name(config), files=files)


def dockerfile(config: RunConfig) -> str:
    """Return what describes the image of a backend that has one; labels are not among it."""
    backend = config.backend
    assert isinstance(backend, _HAVE_IMAGES)
    return _files(backend.kind, backend.base_image)[_DOCKERFILE].decode()


def build_command(config: RunConfig, made: Image, folder: Path) -> tuple[str, ...]:
    """Return the command that has Cloud Build make the image of what lies in `folder`, and keep it."""
    where = (f"--project={config.site.vertex.project}", f"--tag={made.name}")
    return ("gcloud", "builds", "submit", str(folder), *where, *_BUILD_OPTIONS)


def look_command(made: Image) -> tuple[str, ...]:
    """Return the command that succeeds if the image is there."""
    return ("gcloud", "artifacts", "docker", "images", "describe", made.name, "--format=value(image_summary.digest)")


def write(made: Image, folder: Path) -> None:
    """Write the build context into a folder that is new, empty, or holds an earlier one.

    Raises UserError where other files lie there: they would be sent along.
    """
    there = [path for path in folder.rglob("*") if not path.is_dir()] if folder.exists() else []
    is_context = (folder / _DOCKERFILE).is_file() and (folder / _IGNORE).is_file()
    if there and not is_context:
        raise UserError(f"--output {folder}: holds other files, such as {there[0].name}; name a new folder")
    for path in there:
        if path.relative_to(folder).as_posix() not in made.files:
            path.unlink()
    for name, content in made.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _name(config: RunConfig) -> str:
    backend = config.backend
    assert isinstance(backend, _HAVE_IMAGES)
    digest = _digest(backend.kind, backend.base_image)
    return f"{config.site.vertex.repository}/trainwright-{backend.kind}:{digest[:12]}"


def _problems_of_base(base: str) -> Iterator[str]:
    tag = base.rpartition("/")[2].partition(":")[2]
    if "@" not in base and tag in ("", _LATEST):
        yield f"backend.base_image={base} may be another image tomorrow; add a version, or its digest: @sha256:..."


def _problems_of_site(config: RunConfig) -> Iterator[str]:
    site = config.site.vertex
    for key, value in (("project", site.project), ("repository", site.repository)):
        if "<site." in value:
            yield f"site.vertex.{key}={value} is not set; set it in conf/local/default.yaml or on the command line"


@functools.cache  # a sweep asks for each of its runs
def _digest(kind: str, base: str) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(_files(kind, base).items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files(kind: str, base: str) -> dict[str, bytes]:
    dockerfile = (_PACKAGE / "dockerfiles" / f"{kind}.Dockerfile").read_text(encoding="utf-8")
    files = {_DOCKERFILE: dockerfile.replace("@base_image@", base).encode()}
    if kind == "native":
        files["requirements.txt"] = "".join(f"{line}\n" for line in _requirements()).encode()
        files["constraints.txt"] = CONSTRAINTS.read_bytes()
        for path in _PACKAGE.rglob("*"):
            inside = path.relative_to(_PACKAGE)
            if path.is_file() and inside.parts[0] not in _LEFT_OUT and "__pycache__" not in inside.parts:
                files[f"trainwright/{inside.as_posix()}"] = path.read_bytes()
    return files


def _requirements() -> list[str]:
    """Return what trainwright and its extra `native` require, as pip reads it."""
    needed = []
    for line in requires("trainwright") or []:
        requirement, _, condition = line.partition(";")
        if condition.replace('"', "'").strip() in ("", "extra == 'native'"):
            needed.append(requirement.strip())
    return sorted(set(needed))

# One image for every role; the role is the command: `dora run` (the controller), `dora node`, `dora serve`, ...
#
#   docker build -t dora .
#   docker build -t dora --build-arg BASE=lmsysorg/sglang:v0.5.20 .    # NVIDIA GPUs; UNVERIFIED: never built or run
#   docker run --rm --shm-size=1g -v "$PWD/runs:/work/runs" dora run
#
# Live versions are kept in /dev/shm, of which a container has 64 MB by default; without room there they go to the run
# folder. `runs` must be writable for user 10001. To reach the status page from outside:
#   -p 127.0.0.1:8421:8421 ... run --set status.host=0.0.0.0
# Another container resumes a run without --trust-folder if both have the same DORA_TOKEN (docs/SECURITY.md).
# docs/CLUSTER.md has more than one container.
#
# The base is any Debian or Ubuntu with Python 3.11 or newer and pip; tests/containers builds on one made by debootstrap.
# The one for GPUs is SGLang's own image: it has the torch that pyproject.toml admits, so that pip leaves it alone.
ARG BASE=python:3.11-slim
FROM ${BASE}

# pip's own settings, for the build only. --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, the index
# of PyTorch's CPU build, avoids gigabytes of CUDA packages.
# reasoning-gym, another extra, needs a C compiler, which slim images lack.
ARG EXTRAS=pyarrow,renderers
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ARG PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_DISABLE_PIP_VERSION_CHECK=1

# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home dora && install --directory --owner=dora /work /work/runs
# What DORA needs changes less often than DORA: it is a layer of its own, made with an empty package.
COPY pyproject.toml /src/
RUN install -D /dev/null /src/dora/__init__.py && touch /src/README.md /src/LICENSE \
    && python3 -m pip install --no-cache-dir "/src[${EXTRAS}]"
COPY README.md LICENSE /src/
COPY dora /src/dora
RUN python3 -m pip install --no-cache-dir --force-reinstall --no-deps /src

ENV PYTHONUNBUFFERED=1
USER 10001
WORKDIR /work
# Of a controller. A node has no such port: `dora status` of the controller shows the nodes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8421/healthz', timeout=5)"]
# tini reaps what ends after its parent, and passes on SIGTERM.
ENTRYPOINT ["tini", "--", "dora"]
CMD ["--help"]

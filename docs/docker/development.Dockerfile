# torchkiln for those who work on it: compilers, nox, ccache. CUDA's compiler comes with the sessions of nox, in the version
# of their torch.
#
#   docker build --file docs/docker/development.Dockerfile --target development --tag torchkiln-development .
#   docker run --rm --gpus all --volume "$PWD:/work" torchkiln-development nox -s tests
FROM debian:bookworm-slim AS development

# Debian keeps one version of each, so that a pinned one is gone with the next fix of security.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
    ca-certificates ccache g++ gdb git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY .github/nox.txt /opt/nox.txt
RUN python3 -m venv /opt/nox \
    && /opt/nox/bin/pip install --no-cache-dir --require-hashes --requirement /opt/nox.txt
ENV PATH=/opt/nox/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Who has another number on the host says so: docker build --build-arg USER_ID=$(id -u)
ARG USER_ID=1000
RUN useradd --create-home --uid "$USER_ID" developer \
    && git config --system --add safe.directory /work
USER developer
WORKDIR /work
CMD ["nox", "--list"]

# Nsight Compute, Nsight Systems and compute-sanitizer, from NVIDIA's repository. As root, since only root is given what
# --cap-add adds.
#
#   docker build --file docs/docker/development.Dockerfile --tag torchkiln-profiling .
#   docker run --rm --gpus all --cap-add SYS_ADMIN --volume "$PWD:/work" torchkiln-profiling ncu --version
FROM development AS profiling
# hadolint ignore=DL3002
USER root
ADD https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb /opt/keyring.deb
# hadolint ignore=DL3008
RUN dpkg --install /opt/keyring.deb \
    && apt-get update \
    && apt-get install --yes --no-install-recommends \
    cuda-nsight-compute-13-0 cuda-nsight-systems-13-0 cuda-sanitizer-13-0 \
    && rm -rf /var/lib/apt/lists/* /opt/keyring.deb
ENV PATH=/usr/local/cuda-13.0/bin:$PATH
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["ncu", "--version"]

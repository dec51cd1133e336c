# Development of torchkiln: compilers, nox, ccache. The sessions of nox install the CUDA compiler of their torch's version.
#
#   docker build --file docs/docker/development.Dockerfile --target development --tag torchkiln-development .
#   docker run --rm --gpus all --volume "$PWD:/work" torchkiln-development nox -s tests
FROM debian:bookworm-slim@sha256:96e378d7e6531ac9a15ad505478fcc2e69f371b10f5cdf87857c4b8188404716 AS development

# Packages are not pinned: Debian removes a version when its next security fix appears.
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

# For another user id on the host: docker build --build-arg USER_ID=$(id -u)
ARG USER_ID=1000
RUN useradd --create-home --uid "$USER_ID" developer \
    && git config --system --add safe.directory /work
USER developer
WORKDIR /work
CMD ["nox", "--list"]

# Nsight Compute, Nsight Systems and compute-sanitizer, from NVIDIA's repository. The user is root, because --cap-add applies
# to root only.
#
#   docker build --file docs/docker/development.Dockerfile --tag torchkiln-profiling .
#   docker run --rm --gpus all --cap-add SYS_ADMIN --volume "$PWD:/work" torchkiln-profiling ncu --version
FROM development AS profiling
# hadolint ignore=DL3002
USER root
ADD --checksum=sha256:e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d \
    https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb /opt/keyring.deb
# hadolint ignore=DL3008
RUN dpkg --install /opt/keyring.deb \
    && apt-get update \
    && apt-get install --yes --no-install-recommends \
    cuda-nsight-compute-13-0 cuda-nsight-systems-13-0 cuda-sanitizer-13-0 \
    && rm -rf /var/lib/apt/lists/* /opt/keyring.deb
ENV PATH=/usr/local/cuda-13.0/bin:$PATH
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["ncu", "--version"]

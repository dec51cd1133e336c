# torchkiln for use. The base image has no CUDA: its libraries come with torch, the driver is the host's.
#
#   nox -s build      (or put a wheel for Python 3.11 into dist/)
#   docker build --file docs/docker/user.Dockerfile --tag torchkiln .
#   docker run --rm --gpus all torchkiln
FROM debian:bookworm-slim@sha256:96e378d7e6531ac9a15ad505478fcc2e69f371b10f5cdf87857c4b8188404716

# Packages are not pinned: Debian removes a version when its next security fix appears.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/torchkiln
ENV PATH=/opt/torchkiln/bin:$PATH

# The wheel is named by its file, because with --find-links pip would take a newer torchkiln of an index. Its extra `torch`
# requires a torch version that the wheel supports.
COPY dist/torchkiln-*.whl /opt/wheels/
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$(echo /opt/wheels/torchkiln-*.whl)[torch]" \
    && rm -r /opt/wheels

# GPUs and driver libraries that --gpus adds to the container.
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN useradd --create-home user
USER user
WORKDIR /home/user
CMD ["torchkiln", "doctor"]

# torchkiln for those who use it. The base knows nothing of CUDA: torch brings its libraries, the host its driver.
#
#   nox -s build      (or put a wheel for Python 3.11 into dist/)
#   docker build --file docs/docker/user.Dockerfile --tag torchkiln .
#   docker run --rm --gpus all torchkiln
FROM debian:bookworm-slim

# Debian keeps one version of each, so that a pinned one is gone with the next fix of security.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/torchkiln
ENV PATH=/opt/torchkiln/bin:$PATH

# The wheel tells the versions of torch that it is for.
COPY dist/torchkiln-*.whl /opt/wheels/
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --find-links=/opt/wheels 'torchkiln[torch]' \
    && rm -r /opt/wheels

# What --gpus hands to the container.
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN useradd --create-home user
USER user
WORKDIR /home/user
CMD ["torchkiln", "doctor"]

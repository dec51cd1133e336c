"""Usage: run_dockerfile.py DOCKERFILE FOLDER [--target=STAGE] [--volume=HERE:THERE]
[--certificates]

Runs a Dockerfile in FOLDER as root, without a container engine: creates a new Debian root with
mmdebstrap, runs each step of the file in it, then the command of the image. --certificates copies
the certificates of this machine into it, for networks that have their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

CONTEXT = Path(__file__).resolve().parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOUNTS = """
mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" || exit
touch "$0/etc/resolv.conf" && mount --bind /etc/resolv.conf "$0/etc/resolv.conf" || exit
[ -z "$VOLUME" ] || mount --bind "${VOLUME%%:*}" "$0${VOLUME#*:}" || exit
exec chroot "$@"
"""


@dataclass(frozen=True)
class Step:
    """An instruction of a Dockerfile, with its lines joined."""

    name: str
    words: str


def read_steps(text: str, target: str | None = None) -> list[Step]:
    """The instructions of a Dockerfile, up to the end of the stage ``target`` if there is one."""
    steps: list[Step] = []
    line = ""
    for raw in text.splitlines():
        if raw.lstrip().startswith("#") or not raw.strip():
            continue
        line += raw.strip()
        if line.endswith("\\"):
            line = line[:-1]
            continue
        name, _, words = line.partition(" ")
        if name == "FROM" and steps and target and _stage(steps) == target:
            break
        if name not in DO and name != "FROM":
            raise SystemExit(f"run_dockerfile: got {name}, expected one of FROM, {', '.join(DO)}")
        steps.append(Step(name, words.strip()))
        line = ""
    if target and _stage(steps) != target:
        raise SystemExit(f"run_dockerfile: found no stage {target}")
    return steps


def _stage(steps: list[Step]) -> str:
    start = next(step.words for step in reversed(steps) if step.name == "FROM")
    return start.partition(" AS ")[2]


@dataclass
class Image:
    """A root folder, and the settings that instructions have made so far."""

    root: Path
    certificates: bool
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    command: tuple[str, ...] = ()

    def start(self, base: str) -> None:
        """Creates a minimal Debian root folder of this release."""
        match = re.fullmatch(r"debian:(\w+)-slim@sha256:[0-9a-f]{64}( AS \w+)?", base)
        if not match:
            expected = "debian:<name>-slim@sha256:<digest>"
            raise SystemExit(f"run_dockerfile: FROM: got {base}, expected {expected}")
        if self.root.exists():
            shutil.rmtree(self.root)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", match[1], str(self.root)]
        subprocess.run([*bootstrap, "http://deb.debian.org/debian"], check=True)
        if self.certificates:
            (self.root / "etc/ssl/certs").mkdir(parents=True)
            shutil.copy(CERTIFICATES, self.root / "etc/ssl/certs/of-this-machine.crt")

    def inside(self, *command: str, volume: str = "") -> None:
        """Runs a command in the root folder, with the user and the variables of the image."""
        lent = {}
        if self.certificates:
            file = "/etc/ssl/certs/of-this-machine.crt"
            lent = {"PIP_CERT": file, "SSL_CERT_FILE": file, "REQUESTS_CA_BUNDLE": file}
        environment = {
            "HOME": "/root" if self.user == "root" else f"/home/{self.user}",
            "DEBIAN_FRONTEND": "noninteractive",
            "VOLUME": volume,
        }
        chroot = ["unshare", "--mount", "--fork", "--pid", "sh", "-c", MOUNTS, str(self.root)]
        subprocess.run(
            [
                *chroot,
                *(f"--userspec={self.user}:{self.user}", str(self.root)),
                *("/usr/bin/env", "-C", self.folder, *command),
            ],
            env=environment | lent | self.environment | self.arguments,
            check=True,
        )

    def run(self, words: str) -> None:
        self.inside("/bin/sh", "-c", words)

    def copy(self, words: str) -> None:
        *sources, target = words.split()
        place = self.root / target.lstrip("/")
        found = [path for source in sources for path in CONTEXT.glob(source)]
        if not found:
            raise SystemExit(f"run_dockerfile: COPY: found no {' '.join(sources)} in {CONTEXT}")
        if target.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copy(path, place)

    def env(self, words: str) -> None:
        name, _, value = words.partition("=")
        known = self.environment | self.arguments
        self.environment[name] = Template(value).substitute(known)

    def arg(self, words: str) -> None:
        name, _, value = words.partition("=")
        self.arguments[name] = value

    def switch(self, words: str) -> None:
        self.user = words

    def enter(self, words: str) -> None:
        self.folder = words
        (self.root / words.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def keep(self, words: str) -> None:
        self.command = tuple(json.loads(words))


DO = {
    "RUN": Image.run,
    "COPY": Image.copy,
    "ENV": Image.env,
    "ARG": Image.arg,
    "USER": Image.switch,
    "WORKDIR": Image.enter,
    "CMD": Image.keep,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="run_dockerfile", usage=__doc__)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--volume", default="")
    parser.add_argument("--certificates", action="store_true")
    options = parser.parse_args()
    steps = read_steps(options.dockerfile.read_text(encoding="utf-8"), options.target)
    if os.geteuid() != 0 or not shutil.which("mmdebstrap"):
        raise SystemExit(
            "run_dockerfile: needed to be root, and mmdebstrap. Type:\n"
            "  sudo apt-get install mmdebstrap"
        )
    image = Image(options.folder.resolve(), options.certificates)
    for step in steps:
        print(f"=== {step.name} {step.words}", flush=True)
        start = time.perf_counter()
        if step.name == "FROM":
            image.start(step.words)
        else:
            DO[step.name](image, step.words)
        print(f"=== {time.perf_counter() - start:.0f} s", flush=True)
    print(f"=== runs {' '.join(image.command)}", flush=True)
    sys.stdout.flush()
    image.inside(*image.command, volume=options.volume)


if __name__ == "__main__":
    main()

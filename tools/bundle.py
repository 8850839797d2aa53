"""Packs the packages of an environment for a node without a network, and makes .venv from them there.

scripts/collect_bundle.sh and scripts/install_bundle.sh call it. A bundle is a folder with

    manifest.json    Python version, machine, sizes, packages, and the checksum of each piece
    packages.000 ... pieces of one tar.gz of the environment's packages and programs

The node needs the same Python version, and this repository in the same state. Uses the standard library only.
"""

import argparse
import fnmatch
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, NoReturn

REPOSITORY = Path(__file__).parents[1]
FORMAT = 2
_MIB = 2**20
_OF_SETUP = ("scripts/setup.sh", "scripts/requirements-cpu.txt", "setup.cfg", "pyproject.toml")
_OF_VENV = re.compile(r"(python[\d.]*|activate.*|Activate.*|pip[\d.]*|uvx?)$")
"""Programs in .venv/bin that are made on the node, or that it cannot use."""


def refuse(line: str) -> NoReturn:
    """End with one line on stderr and exit code 2."""
    print(f"openrlhf-bapo: {line}", file=sys.stderr)
    sys.exit(2)


def digest_of_setup() -> str:
    """Return a checksum of the files that decide what is installed."""
    return hashlib.sha256(b"".join((REPOSITORY / name).read_bytes() for name in _OF_SETUP)).hexdigest()


def canonical(name: str) -> str:
    """Return a distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- on the connected machine ----


class _Pieces(io.RawIOBase):
    """Writes a stream to files of at most `size` bytes, and notes their checksums."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size, self._file, self._room = folder, size, None, 0
        self.pieces: list[dict] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data)
        while view:
            if not self._room:
                self._end_piece()
                name = f"packages.{len(self.pieces):03}"
                self._file = open(self._folder / name, "wb")  # noqa: SIM115
                self._room, self._digest = self._size, hashlib.sha256()
                self.pieces.append({"name": name, "bytes": 0})
            part = view[: self._room]
            self._file.write(part)
            self._digest.update(part)
            self._room -= len(part)
            self.pieces[-1]["bytes"] += len(part)
            view = view[len(part) :]
        return len(data)

    def _end_piece(self) -> None:
        if self._file is not None:
            self._file.close()
            self.pieces[-1]["sha256"] = self._digest.hexdigest()
            self._file = None

    def close(self) -> None:
        self._end_piece()
        super().close()


def collect(venv: Path, out: Path, device: str, piece_mb: int, without: set[str], leave_out: list[str]) -> None:
    """Pack an environment's packages into the new folder `out`.

    Args:
        venv: the environment.
        out: the bundle's folder.
        device: "cpu" or "gpu", as scripts/setup.sh means it.
        piece_mb: largest size of a piece, in MiB.
        without: distributions that the node has already.
        leave_out: patterns of files, relative to site-packages, that the node does not need.
    """
    (packages,) = venv.glob("lib/python*/site-packages")
    files, names = _files_of(packages, without)
    chosen = [file for file in sorted(files) if not _is_left_out(file, leave_out)]
    has_bytecode = any(file.endswith(".pyc") for file in chosen)
    size = sum((packages / file).stat().st_size for file in chosen)
    if not has_bytecode:  # the node writes it, and it is about as large as its source
        size += sum((packages / file).stat().st_size for file in chosen if file.endswith(".py"))
    out.mkdir(parents=True)
    print(f"packing {len(names)} packages, {size / _MIB:,.0f} MiB", flush=True)
    stream = _Pieces(out, piece_mb * _MIB)
    try:
        with (
            gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=6, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as tar,
        ):
            for file in chosen:
                tar.add(packages / file, _name_in_bundle(packages, venv, file), recursive=False)
        stream.close()
        manifest = {
            "format": FORMAT,
            "python": packages.parent.name.removeprefix("python"),
            "machine": platform.machine(),
            "device": device,
            "setup": digest_of_setup(),
            "prefix": str(venv),
            "bytes": size,
            "bytecode": has_bytecode,
            "packages": sorted(names),
            "without": sorted(without),
            "pieces": stream.pieces,
        }
        (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    except BaseException:
        shutil.rmtree(out)
        raise
    packed = sum(piece["bytes"] for piece in stream.pieces)
    print(f"{out}: {len(stream.pieces)} pieces, {packed / _MIB:,.0f} MiB, for Python {manifest['python']}")


def _files_of(packages: Path, without: set[str]) -> tuple[set[str], set[str]]:
    """Return the files of all distributions but `without`, relative to site-packages, and the distributions' names."""
    files, names = set(), set()
    for found in distributions(path=[str(packages)]):
        name = canonical(found.metadata["Name"])
        if name in without or name in ("pip", "uv"):
            continue
        names.add(f"{name}=={found.version}")
        for file in map(str, found.files or []):
            if (packages / file).is_file() and not Path(file).name.startswith("__editable__"):
                files.add(file)
    # Bytecode that was compiled after the installation is in no list of files.
    caches = {str(Path(file).parent / "__pycache__") for file in files if file.endswith(".py")}
    for cache in caches:
        files |= {f"{cache}/{file.name}" for file in (packages / cache).glob("*.pyc")}
    return files, names


def _is_left_out(file: str, patterns: list[str]) -> bool:
    is_program = file.startswith("..")
    return (is_program and bool(_OF_VENV.match(Path(file).name))) or any(fnmatch.fnmatch(file, p) for p in patterns)


def _name_in_bundle(packages: Path, venv: Path, file: str) -> str:
    """Return a file's name in the archive: packages/... or, for what lies beside site-packages, venv/..."""
    if not file.startswith(".."):
        return f"packages/{file}"
    return f"venv/{Path(os.path.normpath(packages / file)).relative_to(venv)}"


# ---- on the node ----


def read_manifest(bundle: Path) -> dict:
    """Return the manifest of a bundle, whose pieces are all there and whole; refuse any other in one line."""
    try:
        manifest = json.loads((bundle / "manifest.json").read_text())
        wanted = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"{bundle}: no bundle ({type(error).__name__}: manifest.json); allowed: a folder of collect_bundle.sh")
    if wanted != FORMAT:
        refuse(
            f"{bundle}: a bundle of format {wanted}; allowed: {FORMAT}, which this repository's collect_bundle.sh makes"
        )
    for piece in manifest["pieces"]:
        file = bundle / piece["name"]
        if not file.is_file():
            refuse(f"{file}: is missing; the bundle has {len(manifest['pieces'])} pieces")
        if file.stat().st_size != piece["bytes"]:
            refuse(f"{file}: has {file.stat().st_size:,} bytes instead of {piece['bytes']:,}; copy it again")
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256") if hasattr(hashlib, "file_digest") else _digest(stream)
        if digest.hexdigest() != piece["sha256"]:
            refuse(f"{file}: is damaged (its checksum differs); copy it again")
    return manifest


def _digest(stream: IO[bytes]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    while part := stream.read(_MIB):
        digest.update(part)
    return digest


def check_node(bundle: Path, manifest: dict, version: str, has_torch: bool, free: int) -> None:
    """Refuse a node that the bundle is not for, in one line.

    Args:
        bundle: the folder, for messages.
        manifest: of `read_manifest`.
        version: the node's Python, such as "3.11".
        has_torch: whether the environment below has torch.
        free: bytes on the disk of .venv.
    """
    if manifest["python"] != version:
        refuse(
            f"{bundle}: is for Python {manifest['python']}, here it is {version}; PYTHON=... names another interpreter"
        )
    if manifest["machine"] != platform.machine():
        refuse(f"{bundle}: is for a CPU of kind {manifest['machine']}, and this is {platform.machine()}")
    if manifest["setup"] != digest_of_setup():
        refuse(f"{bundle}: was made by another version of this repository; allowed: the same commit on both machines")
    if "torch" in manifest["without"] and not has_torch:
        refuse(f"{bundle}: has no torch; allowed: --on PYTHON, the interpreter of an environment that has it")
    needed = manifest["bytes"] + 64 * _MIB
    if free < needed:
        refuse(f"{REPOSITORY}: {free:,} bytes are free on its disk, and the bundle needs {needed:,}")


def install(bundle: Path, on: str | None) -> None:
    """Make .venv from a bundle. Until it is whole, an earlier .venv stays as it is.

    Args:
        bundle: the folder.
        on: interpreter of an environment whose packages .venv also has; it is not changed. None: no other packages.
    """
    manifest = read_manifest(bundle)
    python = on or os.environ.get("PYTHON") or sys.executable
    ask = "import sys, sysconfig, importlib.util as u; print(*sys.version_info[:2], sep='.'); "
    ask += "print(u.find_spec('torch') is not None); print(sysconfig.get_path('purelib'))"
    try:
        version, torch, purelib = subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, ValueError, subprocess.CalledProcessError):
        refuse(f"{'--on' if on else 'PYTHON'} {python}: is no Python interpreter that runs here")
    check_node(bundle, manifest, version, bool(on) and torch == "True", shutil.disk_usage(REPOSITORY).free)

    venv, aside, old = (REPOSITORY / name for name in (".venv", ".venv.part", ".venv.old"))
    shutil.rmtree(aside, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        subprocess.run([python, "-m", "venv", "--without-pip", str(aside)], check=True)
        (packages,) = aside.glob("lib/python*/site-packages")
        print(f"unpacking {len(manifest['packages'])} packages", flush=True)
        _unpack(bundle, manifest, packages, aside, venv)
        if not manifest["bytecode"]:
            print("compiling them", flush=True)
            _compile(python, packages)
        (packages / "openrlhf_bapo.pth").write_text(f"{REPOSITORY}\n")
        if on:
            (packages / "on.pth").write_text(f"import site; site.addsitedir({purelib!r})\n")
        for script in aside.glob("bin/[aA]ctivate*"):
            script.write_text(script.read_text().replace(str(aside), str(venv)))
        _write_stamp(aside, manifest["device"])
        shutil.rmtree(old, ignore_errors=True)
        if venv.exists():
            venv.rename(old)
        aside.rename(venv)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not venv.exists():
            old.rename(venv)
    shutil.rmtree(old, ignore_errors=True)
    print(f"{venv}: is ready; its programs need no network")


def _unpack(bundle: Path, manifest: dict, packages: Path, aside: Path, venv: Path) -> None:
    """Unpack into the new environment; programs call the interpreter at its final place."""
    before, after = f"#!{manifest['prefix']}/bin/python".encode(), f"#!{venv}/bin/python".encode()
    pieces = [bundle / piece["name"] for piece in manifest["pieces"]]
    with (
        subprocess.Popen(["cat", *pieces], stdout=subprocess.PIPE) as joined,
        tarfile.open(fileobj=joined.stdout, mode="r|gz") as tar,
    ):
        for member in tar:
            root, name = member.name.split("/", 1)
            member.name = name
            tar.extract(member, packages if root == "packages" else aside, filter="data")
            if root == "venv" and name.startswith("bin/"):
                content = (aside / name).read_bytes()
                if content.startswith(before):
                    (aside / name).write_bytes(after + content[len(before) :])


def _compile(python: str, packages: Path) -> None:
    """Write the bytecode of the packages. Otherwise each process of a run compiles what it imports.

    Some packages hold files that are not Python of this version, so errors count for nothing.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [python, "-m", "compileall", "-q", "-j", "0", str(packages)]
    subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _write_stamp(venv: Path, device: str) -> None:
    """Mark the environment as scripts/setup.sh does, so that setup.sh finds nothing to do."""
    command = 'cat "$@" | cksum'
    checksum = subprocess.run(
        ["bash", "-c", command, "_", *_OF_SETUP], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()
    (venv / "openrlhf-bapo.stamp").write_text(f"{device} {REPOSITORY} {checksum}\n")


def main() -> None:
    """Collect or install."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = refuse  # type: ignore[assignment, method-assign]
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect", help="on a machine with a network")
    collecting.error = refuse  # type: ignore[assignment, method-assign]
    collecting.add_argument("out", type=Path, help="folder to make")
    collecting.add_argument("--venv", type=Path, default=REPOSITORY / ".venv", help="environment (default: .venv)")
    collecting.add_argument("--device", choices=["cpu", "gpu"], required=True)
    collecting.add_argument("--piece_mb", type=int, default=2000, help="largest piece in MiB (default: %(default)s)")
    collecting.add_argument("--without", type=Path, help="file with the packages that the node has, as of pip freeze")
    collecting.add_argument("--leave_out", nargs="*", default=[], help="patterns of files, relative to site-packages")
    installing = verbs.add_parser("install", help="on the node")
    installing.error = refuse  # type: ignore[assignment, method-assign]
    installing.add_argument("bundle", type=Path)
    installing.add_argument("--on", help="interpreter of an environment whose packages .venv also has, such as torch")
    args = parser.parse_args()
    if args.verb == "install":
        install(args.bundle, args.on)
        return
    if args.piece_mb < 1:
        refuse(f"--piece_mb {args.piece_mb}: allowed: 1 or more")
    if args.out.exists():
        refuse(f"{args.out}: exists; allowed: a new folder")
    if not any(args.venv.glob("lib/python*/site-packages")):
        refuse(f"--venv {args.venv}: is no environment; allowed: a folder of python -m venv")
    if args.without and not args.without.is_file():
        refuse(f"--without {args.without}: no such file; allowed: the output of pip freeze on the node")
    lines = args.without.read_text().splitlines() if args.without else []
    without = {canonical(re.split(r"[ =@<>~]", line)[0]) for line in lines if line.strip() and line[0] not in "#-"}
    collect(args.venv.resolve(), args.out, args.device, args.piece_mb, without, args.leave_out)


if __name__ == "__main__":
    main()

"""What a machine has that results depend on. Sent to other machines as code, so it must work where simic is missing.

Only the standard library is imported, and torch is looked at but not loaded: a probe takes a fraction of a second.
"""

from __future__ import annotations


def probe() -> dict[str, str | int | None]:
    """Versions and kind of this machine; None for a package that is not installed."""
    import os
    import platform
    import socket
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    facts: dict[str, str | int | None] = {
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "instructions": _instructions(),
    }
    facts |= {package: installed(package) for package in ("torch", "numpy")}
    facts["torch_build"] = _torch_build()
    return facts | _simic()


def _simic() -> dict[str, str | None]:
    """Version of simic, and a hash of its source: a version alone does not tell two commits apart."""
    import hashlib
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("simic")
    if spec is None or spec.origin is None:
        return {"simic": None, "code": None}
    root, digest = Path(spec.origin).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    version = "?"
    for line in (root / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            version = line.split("=")[1].strip().strip("\"'")
    return {"simic": version, "code": digest.hexdigest()[:16]}


def _torch_build() -> str | None:
    """The commit that torch was built from, and for which accelerator."""
    import importlib.util
    import runpy
    from pathlib import Path

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    build = runpy.run_path(str(path)) if path.is_file() else {}
    return f"{build.get('git_version', '?')[:12]} {build.get('cuda') or build.get('hip') or build.get('xpu') or 'cpu'}"


def _instructions() -> str:
    """The widest vector instructions, which decide the order of sums; empty where they cannot be told."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line.split() for line in file if line.startswith(("flags", "Features"))), [])
    except OSError:
        return ""
    known = ("amx_tile", "avx512f", "avx2", "sve2", "sve", "asimd")
    return next((name for name in known if name in flags), "")

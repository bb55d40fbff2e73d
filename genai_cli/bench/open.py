"""A package as the benchmark sees it: engines without a prefix cache, bytes a token reads, and the parity that vouches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from genai_cli.backends.cpu import CpuBackend
from genai_cli.backends.cuda_device import CudaOptions
from genai_cli.bench import peer
from genai_cli.bench.batch import ALONE, BatchArm, BatchFound, BatchSize, NativeBatch, bench_batch
from genai_cli.bench.crowd import Crowd
from genai_cli.bench.energy import open_joules
from genai_cli.bench.machine import (
    Ceilings,
    ceilings,
    device_ceilings,
    kv_bytes_per_token,
    weight_bytes_per_token,
)
from genai_cli.bench.micro import MicroReport
from genai_cli.bench.micro_run import run_micro
from genai_cli.bench.process import ProcessTrial, Start, start
from genai_cli.bench.profile import ProfileReport, operations, profile
from genai_cli.bench.report import BenchReport, Parity, ProcessFigures, process_figures
from genai_cli.bench.session import Progress, Subject, Tools, bench
from genai_cli.bench.trials import Arm, Meters, Phase, draw_ids, in_turn, of_kinds, phases, without
from genai_cli.checks import session
from genai_cli.checks.parity import Settings
from genai_cli.checks.target import Place
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.graph.loader import external_files
from genai_cli.model import BackendName, OpenOptions, open_model, peak_rss_bytes
from genai_cli.package.decoder import LoadedDecoder, load_decoder
from genai_cli.package.open import open_package

PEERS = ("ort", peer.NAME)
PHASES = ("load", "prefill", "decode", "batch")
COLD_TOKENS = 32  # of the prompt of a cold start
PARITY_STEPS = 8
PARITY_TOKENS = 64  # of the first prefill's ids


@dataclass(frozen=True)
class BenchOptions:
    """What the command line asks for."""

    peers: tuple[str, ...] = ()
    prompts: tuple[int, ...] = (128, 512)
    contexts: tuple[int, ...] = (64, 1024)
    n_new: int = 32
    rounds: int = 2
    phases: tuple[str, ...] = PHASES
    batch: BatchSize = field(default_factory=BatchSize)
    seed: int = 0
    parity: bool = True
    cache_dir: Path | None = None
    device: str = "cpu"  # of native and of ONNX Runtime
    cuda: CudaOptions | None = None


def num_trials(options: BenchOptions) -> int:
    """For a progress bar: at most so many trials, warm-ups included."""
    lengths = {"load": 1, "prefill": len(options.prompts), "decode": len(options.contexts)}
    num_phases = sum(count for kind, count in lengths.items() if kind in options.phases)
    arms, rounds = len(options.peers) + 1, options.rounds
    total = num_phases * (1 + 4 * rounds + (arms * (1 + 2 * rounds) if options.peers else 0))
    total += 2 * rounds * (arms + 1) if "load" in options.phases else 0
    return total + (2 * (2 + (peer.NAME in options.peers)) if "batch" in options.phases and options.batch.count else 0)


def run(model: Path, options: BenchOptions, place: Place, isa: str | None, progress: Progress) -> BenchReport:
    """Benchmark a package on the CPU. GenaiError for what is wrong with it, or for a peer nobody knows."""
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        wanted = " or ".join(PEERS)
        raise GenaiError(
            f"--vs `{unknown[0]}` is no engine that can be measured here; wanted {wanted}", hint="--vs ort"
        )
    if peer.NAME in options.peers:
        if options.device != "cpu":
            raise GenaiError(
                f"--vs `{peer.NAME}` runs on the CPU here, `{options.device}` was asked for", hint="--vs ort"
            )
        peer.library()
    crowd = Crowd()
    subject = open_subject(model, options, place, isa)
    joules, energy = open_joules()
    tools = Tools(
        lambda: _ceilings(place, isa, options), peak_rss_bytes, _parity(subject, options, place, progress),
        Meters(joules=joules), energy,
    )  # fmt: skip
    if "batch" in options.phases and options.batch.count and options.device == "cpu":
        tools = replace(tools, batch=lambda parity: _batch(subject, options, place, isa, tools, parity, progress))
    native = _arm("native", model, place.threads, isa, options)
    peers = [_peer(name, subject, place.threads, options) for name in dict.fromkeys(options.peers)]
    report = bench(subject, native, peers, tools, seed=options.seed, rounds=options.rounds, progress=progress)
    if "load" not in options.phases or options.device != "cpu":
        return replace(report, others_cpu=crowd.share())
    names = ["native", "native exact", *(arm.name for arm in peers)]
    processes = _processes(subject, options, names, isa, progress)
    size = _artifact_bytes(model)
    return replace(report, processes=processes, artifact_bytes=size, others_cpu=crowd.share())


def _processes(
    subject: Subject, options: BenchOptions, names: list[str], isa: str | None, progress: Progress
) -> list[ProcessFigures]:
    """Fresh processes in turn, those of one pair with the same ids; an engine that cannot start is left out (the report
    says why elsewhere)."""
    trials: dict[str, list[ProcessTrial]] = {}
    for name, pair in in_turn(names, options.rounds):
        progress(f"cold start ({name})")
        progress(None)
        ids = draw_ids(Phase("load", COLD_TOKENS), subject.vocab_size, options.seed, pair)
        try:
            made = start(Start(name, subject.model, subject.threads, isa, tuple(ids.tolist())))
        except GenaiError:
            continue
        trials.setdefault(name, []).append(made)
    return [process_figures(found) for found in trials.values()]


def _artifact_bytes(model: Path) -> int:
    decoder = load_decoder(open_package(model))
    files = [decoder.path, *(decoder.path.parent / name for name in external_files(decoder.path))]
    return sum(file.stat().st_size for file in files)


def _batch(
    subject: Subject, options: BenchOptions, place: Place, isa: str | None, tools: Tools, parity: Parity,
    progress: Progress,
) -> BatchFound:  # fmt: skip
    """Native in shared steps, native one after another, and the peer that has batches."""
    package = open_package(subject.model)
    engine, rows = _native_options(place, isa), options.batch.count
    arms = [
        BatchArm("native", rows, lambda: NativeBatch(open_model(subject.model, engine), rows)),
        BatchArm(ALONE, 1, lambda: NativeBatch(open_model(subject.model, engine), 1)),
    ]
    if peer.NAME in options.peers:
        pad = package.pad_token_id
        arms.append(BatchArm(peer.NAME, rows, lambda: peer.PeerBatch(subject.model, place.threads, pad)))
    size = replace(options.batch, avoid=package.image_token_id).cut_to(load_decoder(package).context_len)
    return bench_batch(
        arms, size, subject.vocab_size, tools.meters, tools.settle, seed=options.seed, parity=parity, progress=progress
    )  # fmt: skip


def _peer(name: str, subject: Subject, threads: int, options: BenchOptions) -> Arm:
    if name != peer.NAME:
        return _arm("ort", subject.model, threads, None, options)
    capacity = max((phase.num_ids for phase in subject.phases), default=1)
    return Arm(name, lambda: peer.PeerRunner(subject.model, threads, capacity))


def run_profile(
    model: Path, options: BenchOptions, place: Place, isa: str | None, trace: Path | None, progress: Progress
) -> ProfileReport:
    """Time per op of native's prefill and decode on the CPU."""
    context_len = load_decoder(open_package(model)).context_len
    found = phases(context_len, options.prompts, options.contexts, options.n_new)
    return profile(model, found, options.batch.count, _native_options(place, isa), options.seed, trace, progress)


def micro(
    model: Path, options: BenchOptions, place: Place, isa: str | None, only: str, progress: Progress
) -> MicroReport:  # fmt: skip
    """Kernels of the first prefill and of a step behind the last context, and what lies between kernels."""
    lengths = options.prompts[0], options.contexts[-1]
    return run_micro(model, _native_options(place, isa), lengths, only, options.seed, progress)


def _ceilings(place: Place, isa: str | None, options: BenchOptions) -> Ceilings:
    if options.device != "cpu":
        return device_ceilings(place.open_backend())
    return ceilings(CpuBackend(threads=place.threads, isa=isa))


def _native_options(place: Place, isa: str | None) -> OpenOptions:
    return OpenOptions("native", threads=place.threads, isa=isa, prefix_cache=False)


def open_subject(model: Path, options: BenchOptions, place: Place, isa: str | None) -> Subject:
    """Lengths cut to the context, what a token reads and what a prefill computes."""
    package = open_package(model)
    decoder = load_decoder(package)
    found = of_kinds(phases(decoder.context_len, options.prompts, options.contexts, options.n_new), options.phases)
    lengths = [phase.n_prompt for phase in found if phase.kind == "prefill"]
    here = options.device == "cpu"  # what a device computes at most is not measured
    done = operations(model, _native_options(place, isa), lengths, options.seed) if here else {}
    return Subject(model, place.description, place.threads, found, _traffic(decoder), done, package.vocab_size or 0)


def _traffic(decoder: LoadedDecoder) -> Callable[[int], int | None]:
    weights, io = weight_bytes_per_token(decoder.graph), decoder.io
    return lambda length: None if weights is None else weights + kv_bytes_per_token(io, length)


def _arm(name: BackendName, model: Path, threads: int, isa: str | None, options: BenchOptions) -> Arm:
    opened = OpenOptions(name, options.device, threads, isa=isa, prefix_cache=False, cuda=options.cuda)
    return Arm(name, lambda: open_model(model, opened).runner)


def _parity(subject: Subject, options: BenchOptions, place: Place, progress: Progress) -> Callable[[], Parity]:
    """Random ids like those that were timed, through `genai parity`."""
    prefill = Phase("prefill", options.prompts[0])

    def judged() -> Parity:
        if not options.parity:
            return "not run"
        drawn = draw_ids(prefill, subject.vocab_size, options.seed, 0)[:PARITY_TOKENS]
        ids = without(drawn, open_package(subject.model).image_token_id)
        settings = Settings(steps=PARITY_STEPS, seed=options.seed, locate=False, cache_dir=options.cache_dir)
        request = session.Request(ids=tuple(int(token) for token in ids))
        report = session.run(subject.model, request, settings, place, progress)
        return "passed" if report.exit_code == ExitCode.OK else "failed"

    return judged

"""The verb explain: what a run would hold, move and compute on each device, without running it.

The step is compiled for as many virtual devices as the mesh has, from shapes alone: nothing of the
model's size is allocated, and no accelerator is touched.
"""

import concurrent.futures
import dataclasses
import gc
import math
import re
import time
from collections.abc import Iterable
from typing import Any

import jax
import keras

from input_pipeline.dataset import Dataset
from input_pipeline.pipeline import Pipeline
from input_pipeline.structure import Spec, map_structure
from trainer import scaling
from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.loading import load_dataset
from trainer.monitoring.printout import itemsize
from trainer.monitoring.readable import size
from trainer.program import Program, set_defaults
from trainer.strategies import device_mesh, philox

_UNITS = {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# The program will not run: leave its machine code as it comes.
_ANALYSIS_ONLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def run(config: Config) -> int:
    """Prints the explanation. Returns the exit code."""
    start = time.monotonic()
    gc.disable()  # tracing makes millions of small objects, and this process ends soon
    limit = parse_size(config.device_memory) if config.device_memory else None
    hardware = scaling.Hardware.parse(config.predict) if config.predict else None
    set_defaults(config.precision)
    strategy = device_mesh.create(config, abstract=True)  # before the user's modules, which may compute by JAX
    data = load_dataset(dataclasses.replace(config, cache="none"))  # no example is read
    replicas = config.replicas or strategy.devices
    config.check_batch(strategy.devices, replicas)
    program = Program(config, data, max(1, config.steps), replicas, strategy.scope())
    program.draw_from(philox.GENERATORS["jax"])
    program.leave_what_stays()
    strategy.compile(program)
    print(_arithmetic(config, data, strategy, program))
    print(_variables(program, strategy))
    for picture in strategy.pictures():
        print(f"\n{picture}")
    block = _block(config, data, replicas)
    lowered = strategy.lower(block)
    with concurrent.futures.ThreadPoolExecutor() as beside:  # XLA compiles without holding Python up
        counted = beside.submit(strategy.flops, block)
        compiled, flops = lowered.compile(_ANALYSIS_ONLY), counted.result()
    print(_step(strategy, compiled, flops, limit))
    if hardware:
        sums = 4 * sum(strategy.elements_on_device(v) for v in program.model.trainable_variables)
        print(f"\nsteps on other numbers of devices, {size(sums)} added up in each, --predict={config.predict}:")
        state = sum(strategy.elements_on_device(v) * itemsize(v.dtype) for v in program.variables.values())
        examples = config.global_batch / strategy.devices
        print(scaling.table(flops / strategy.mesh.size, sums, examples, state, hardware))
    print(f"\nexplained in {time.monotonic() - start:.1f}s")
    return OK


def parse_size(text: str) -> float:
    """'80GiB' -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]i?B|)", text)
    if not match or match[2] not in _UNITS:
        raise UserError("device_memory", text, "is no size", "for example 80GiB or 16GB")
    return float(match[1]) * _UNITS[match[2]]


def _block(config: Config, data: Dataset, replicas: int) -> Any:
    """Shapes of one block of one step, (1, V, b, ...)."""
    pipeline = Pipeline(data.train, config.seed, config.global_batch, replicas, [range(replicas)], 1)

    def abstract(spec: Spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jax.dtypes.canonicalize_dtype(spec.dtype))

    return map_structure(abstract, pipeline.spec)


def _arithmetic(config: Config, data: Dataset, strategy: device_mesh.DeviceMesh, program: Program) -> str:
    b, n, shares, replicas = config.global_batch, len(data.train), strategy.devices, program.replicas
    lines = {
        "strategy": f"{strategy.description}; {strategy.mesh.size} devices, 1 process",
        "batch": f"{b} examples a step = {replicas} logical replicas x {b // replicas} examples; each of {shares} "
        f"shares of the data axis computes {replicas // shares} a step",
        "data": f"{n:,} examples to train on, {n / b:.4g} steps a pass, no padding",
        "layout": config.layout,
        **program.doubts,
    }
    if data.validation is not None:
        m = len(data.validation)
        padded = -(-m // b) * b
        lines["evaluation"] = f"{m:,} examples in {padded // b} steps; {padded - m} of {padded:,} places are padding"
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items())


def _variables(program: Program, strategy: device_mesh.DeviceMesh) -> str:
    """A row for each variable of the model; those that differ by a number in their path share one."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for variable in [*program.model.trainable_variables, *program.objective.state_variables]:
        placement = strategy.layout.place(variable.path, variable.shape)
        slots = strategy.layout.place_slots(variable.shape, placement.axes) if variable.trainable else placement.axes
        share = f"; zero1: slots, dim {slots.index('data')} over data" if slots != placement.axes else ""
        held = strategy.elements_on_device(variable) * itemsize(variable.dtype)
        path = re.sub(r"\d+(?=/)|(?<=_)\d+", "*", variable.path)
        axes = "(" + ", ".join(axis or "-" for axis in placement.axes) + ")"
        dtype = keras.backend.standardize_dtype(variable.dtype)
        key = (path, "x".join(map(str, variable.shape)), dtype, axes, size(held), placement.rule + share)
        rows.setdefault(key, []).append(held)
    table: list[tuple[str, ...]] = [("variable", "count", "shape", "dtype", "layout", "each on a device", "rule")]
    table += [(key[0], str(len(held)), *key[1:]) for key, held in rows.items()]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table)
    model = [*program.model.trainable_variables, *program.objective.state_variables]
    totals = [
        f"{name:>10}  {size(_bytes(strategy, variables))} on each device, of {size(_whole(variables))}"
        for name, variables in (("parameters", model), ("optimizer", program.optimizer.variables))
    ]
    return f"\n{text}\n\n" + "\n".join(totals)


def _bytes(strategy: device_mesh.DeviceMesh, variables: Iterable[Any]) -> int:
    return sum(strategy.elements_on_device(v) * itemsize(v.dtype) for v in variables)


def _whole(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.shape) * itemsize(v.dtype) for v in variables)


@dataclasses.dataclass
class Collective:
    """One kind of collective in a compiled step: how many, and bytes of their results on a device."""

    count: int = 0
    bytes: float = 0.0


def collectives(hlo: str) -> dict[str, Collective]:
    """The collectives of one call of a compiled program, from its text; loops of a known length count fully."""
    bodies = re.split(r"\n(?=(?:ENTRY )?%\S+ \()", hlo)
    names = [match[1] if (match := re.match(r"(?:ENTRY )?%(\S+)", body.lstrip())) else "" for body in bodies]
    times = dict.fromkeys(names, 1)
    for name, body in zip(reversed(names), reversed(bodies), strict=True):  # callers come after what they call
        for loop in re.finditer(r"while\(.*?body=%([\w.\-]+)(.*)", body):
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop[2])
            times[loop[1]] = times[name] * (int(known[1]) if known else 1)
    found: dict[str, Collective] = {}
    for name, body in zip(names, bodies, strict=True):
        for match in re.finditer(rf" = (.*?) ({_COLLECTIVES})(?:-start)?\(", body):
            entry = found.setdefault(match[2], Collective())
            entry.count += times[name]
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                bits = re.search(r"\d+", dtype)
                elements = math.prod(int(d) for d in dims.split(",") if d)
                entry.bytes += times[name] * elements * (int(bits[0]) / 8 if bits else 1)
    return found


def _step(strategy: Any, compiled: jax.stages.Compiled, flops: float, limit: float | None) -> str:
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = held + memory.temp_size_in_bytes
    lines = [
        "",
        "the compiled step, on each device (XLA's own analysis, for CPUs):",
        f"{'held':>10}  {size(held)}: variables, a batch and results",
        f"{'temporary':>10}  {size(memory.temp_size_in_bytes)}: activations, gradients and buffers of collectives",
        f"{'memory':>10}  {size(total)} in all",
        f"{'compute':>10}  {flops / 1e9:,.4g} GFLOP a step, {flops / strategy.mesh.size / 1e9:,.4g} on each device",
    ]
    found = collectives(compiled.as_text() or "")
    for kind, entry in sorted(found.items()):
        lines.append(f"{'moves':>10}  {entry.count} x {kind} a step, {size(entry.bytes)} received in all")
    if not found:
        lines.append(f"{'moves':>10}  nothing between devices")
    if limit is not None:
        verdict = "fits" if total <= limit else "does not fit"
        fix = (
            ""
            if total <= limit
            else "; --layout=zero1 or fsdp, more shares, --remat, more --replicas, a smaller batch help"
        )
        lines.append(f"{'verdict':>10}  {size(total)} {verdict} into {size(limit)}{fix}")
    return "\n".join(lines)

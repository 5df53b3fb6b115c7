"""The tower of `demo:k3` on one GPU in bfloat16, with products in 8 bits, with attention in 8 bits, and with both.

    python -m benchmarks.fp8 [--parts products,fused,steps,errors,workloads] [--only "1 x 224,64 x 224"] [--out FILE]

products   microseconds and TFLOP/s of each product: bfloat16, 8 bits with a scale for each row and channel, 8 bits with
           one scale for each tensor; many calls over changing inputs, launched as one graph
fused      fc0 with scales, GELU and rounding in the epilogue of a kernel of our own, against the product and a kernel
           after it, with a verdict for each number of patches (`encoder.fp8.FUSED_FC0_FROM` is where it is switched on)
steps      microseconds of the kernels that quantise, beside those that they replace
errors     relative L2 error of the residual stream after each block, and of the result, against float32 with exact
           attention
workloads  those of `benchmarks.tower`; the versions take turns within one run, small batches as CUDA graphs
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import RESULTS, describe
from benchmarks.tower import LONG_MS, MIXED, WORKLOADS, alternate, breakdown, make_batch, timed
from encoder import Engine, NoUsableBackend, PackedBatch, attention, split
from encoder.attention.fp8_heads import quantize_heads, turn_and_quantize_heads
from encoder.attention.reference import ReferenceAttention
from encoder.fp8 import FUSED_ROWS
from encoder.fp8_gemm import Tiling, linear_gelu_rows
from encoder.fusion import choose_row_ops
from encoder.graphs import BlockGraphs
from encoder.ops import PLAIN, Norm, Product, Quantized, Unscaled
from encoder.quantization import (
    FP8,
    LARGEST,
    PLAIN_ROWS,
    emulated_product,
    gelu_scale,
    product,
    quantize,
    unscaled_product,
)
from encoder.quantization import quantize_rows as plain_quantize_rows

MODEL = "demo:k3"
PARTS = "products", "fused", "steps", "errors", "workloads"
ROWS = 256, 1024, 2048, 5476, 16384, 43056  # patches
SHAPES = {  # name -> K, N
    "wqkv": (1024, 4608),
    "wo": (1536, 1024),
    "fc0": (1024, 4096),
    "fc1": (4096, 1024),
    "proj.0": (4096, 4096),
    "proj.2": (4096, 7168),
}
FUSED_ROW_COUNTS = 5476, 16384, 43056
TILINGS = (
    Tiling(128, 256, 128, 3, 8),
    Tiling(128, 256, 128, 3, 8, flatten=False),
    Tiling(128, 256, 64, 4, 8),
    Tiling(256, 128, 128, 3, 8),
    Tiling(128, 128, 128, 4, 8),
    Tiling(128, 128, 128, 4, 4),
)
WHAT = (
    "Milliseconds of the tower and projector of demo:k3 in bfloat16, with matrix products in 8 bits, with attention in "
    "8 bits, and with both; the versions take turns."
)
LONG_PATCHES = 60_000
TENSOR_ROUND = "a scale for each tensor"
BROKEN_DOWN = "4 x 1080p", "64 x 224", "1 x 1024"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    arguments.add_argument("--only", help="comma-separated workloads (default: all)")
    arguments.add_argument("--out", type=Path, default=RESULTS / "fp8.json")
    options = arguments.parse_args()
    parts, chosen = options.parts.split(","), options.only.split(",") if options.only else list(WORKLOADS)
    report: dict[str, Any] = {"what": WHAT, "model": MODEL, **describe("torch", "triton", "flashinfer-python")}
    print(report["gpu"], report["versions"], flush=True)
    if "products" in parts:
        report["products"] = products()
        save(report, options.out)
    if "fused" in parts:
        report["fused_us"] = fused_products()
        save(report, options.out)
    if "steps" in parts or "errors" in parts or "workloads" in parts:
        engines = load()
        report["attention"] = {name: engine.attention.self_test for name, engine in engines.items()}
        print(f"attention {report['attention']}", flush=True)
        if "steps" in parts:
            report["steps_us"] = steps(engines)
        if "errors" in parts:
            report["errors"] = errors(engines)
        save(report, options.out)
        if "workloads" in parts:
            report["workloads"] = {}
            for name in chosen:
                report["workloads"][name] = measure(name, engines)
                save(report, options.out)
            report["breakdown_ms"] = {}
            for name in BROKEN_DOWN if not options.only else ():
                batch = make_batch(WORKLOADS[name][0])
                report["breakdown_ms"][name] = {
                    title: breakdown(replace(engines[title], graphs=None), batch)
                    for title in ("bf16", "products", "both")
                    if title in engines
                }
                print(name, json.dumps(report["breakdown_ms"][name]), flush=True)
    if report.get("workloads"):
        report["table"] = table(report)
    save(report, options.out)
    print(f"written to {options.out}")


def save(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def load() -> dict[str, Engine]:
    """ "bf16", "products", and where FlashInfer has it "attention" and "both": what is in 8 bits."""
    base = Engine.load(MODEL, device="cuda")
    model = copy.deepcopy(base.model)
    with torch.inference_mode():
        quantize(model, choose_row_ops(base.config, base.device, base.dtype))
    quantized = replace(base, model=model, quantization="fp8", graphs=BlockGraphs(model, base.device, base.dtype))
    engines = {"bf16": base, "products": quantized}
    vision = base.config.vision
    with suppress(NoUsableBackend):
        resolution = attention.resolve(
            "flashinfer_fp8",
            device=base.device,
            dtype=base.dtype,
            head_dim=vision.head_dim,
            family=base.config.family,
        )
        try:
            in_8_bits = attention.start(
                resolution,
                num_heads=vision.num_heads,
                head_dim=vision.head_dim,
                device=base.device,
                dtype=base.dtype,
            )
        except NoUsableBackend as error:
            print(f"no attention in 8 bits: {error}")
            raise
        engines["attention"] = replace(base, attention=in_8_bits)
        engines["both"] = replace(quantized, attention=in_8_bits)
    base.warm_up()
    quantized.warm_up()
    return engines


def products() -> dict[str, dict[str, Any]]:
    found = {}
    for name, (k, n) in SHAPES.items():
        weight = torch.randn(n, k, device="cuda").bfloat16()
        for patches in ROWS:
            num_rows = patches // 4 if name.startswith("proj") else patches
            times, tflop = product_us(num_rows, weight), 2 * num_rows * k * n / 1e6
            found[f"{name} {num_rows} x {k} x {n}"] = {
                title: {"us": round(us, 1), "tflops": round(tflop / us)} for title, us in times.items()
            }
            line = ", ".join(f"{title} {us:.1f} us {tflop / us:.0f}" for title, us in times.items())
            print(f"{name:7s} {num_rows:6d} x {k} x {n}: {line}", flush=True)
    return found


def product_us(num_rows: int, weight: Tensor) -> dict[str, float]:
    copies = num_copies(2 * num_rows * weight.shape[1])
    inputs = [torch.randn(num_rows, weight.shape[1], device="cuda").bfloat16() for _ in range(copies)]
    by_row, by_channel = [plain_quantize_rows(x) for x in inputs], plain_quantize_rows(weight)
    by_tensor, whole = [quantize_whole(x) for x in inputs], quantize_whole(weight)
    versions: dict[str, Callable[[int], Tensor]] = {
        "bf16": lambda i: F.linear(inputs[i], weight),
        "row": lambda i: product(by_row[i], by_channel, None, torch.bfloat16),
        "tensor": lambda i: torch._scaled_mm(
            by_tensor[i].values,
            whole.values.t(),
            scale_a=by_tensor[i].scale,
            scale_b=whole.scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ),
    }
    return {title: graphed_us(run, copies) for title, run in versions.items()}


def num_copies(num_bytes: int) -> int:
    """Inputs that take turns, together more than the cache holds where memory allows it."""
    return max(2, min(8, 2**28 // num_bytes))


def fused_products() -> dict[str, dict[str, Any]]:
    """Microseconds; `error` is that of GELU(fc0) in 8 bits against float32 of the same 8-bit inputs."""
    weight = plain_quantize_rows((torch.randn(4096, 1024, device="cuda") / 32).bfloat16())
    norm = Norm("rmsnorm", 1024, 1e-6).cuda().requires_grad_(False)
    norm.weight.fill_(1.0)
    out_scale, one = gelu_scale(norm, weight), torch.ones((), device="cuda")
    found: dict[str, dict[str, Any]] = {}
    for patches in FUSED_ROW_COUNTS:
        inputs = [plain_quantize_rows(norm(torch.randn(patches, 1024, device="cuda"))) for _ in range(4)]
        exact = F.gelu(emulated_product(inputs[0], weight, None, torch.float32), approximate="tanh")
        two: dict[str, Callable[[int], Quantized]] = {
            "product, gelu_rows": partial(product_then_gelu, inputs, weight),
            "unscaled, gelu_rows": partial(unscaled_then_gelu, inputs, weight, one),
        }
        results = {title: timed_and_checked(run, exact, len(inputs)) for title, run in two.items()}
        for tiling in TILINGS:
            run = partial(one_kernel, inputs, weight, out_scale, tiling)
            try:
                results[str(tuple(tiling))] = timed_and_checked(run, exact, len(inputs))
            except Exception as problem:  # a tiling that does not fit the chip, or does not compile
                results[str(tuple(tiling))] = {"failed": f"{type(problem).__name__}: {str(problem)[:120]}"}
                torch.cuda.synchronize()
        found[str(patches)] = results
        for title, result in results.items():
            print(f"fused {patches:6d} {title:40s} {result}", flush=True)
        print(f"fused {patches:6d} {verdict(results, list(two))}", flush=True)
    return found


def timed_and_checked(run: Callable[[int], Quantized], exact: Tensor, copies: int) -> dict[str, Any]:
    rows = run(0)
    error = relative(rows.values.float() * rows.scale, exact)
    return {"us": round(graphed_us(run, copies), 1), "error": round(error, 4)}


def verdict(results: dict[str, dict[str, Any]], two: list[str]) -> str:
    """Of the tilings that are as exact as two kernels the fastest, against the faster pair of kernels."""
    pair = min(two, key=lambda title: results[title]["us"])
    allowed = 1.2 * results[pair]["error"]
    right = [t for t, r in results.items() if t not in two and r.get("error", float("inf")) <= allowed]
    if not right:
        return "VERDICT: no tiling compiles and is right"
    best = min(right, key=lambda title: results[title]["us"])
    us, pair_us = results[best]["us"], results[pair]["us"]
    word = "GAINS" if us < pair_us else "LOSES"
    return f"VERDICT: one kernel {word}: {best} {us} us, {pair} {pair_us} us, {us / pair_us:.2f}"


def product_then_gelu(inputs: list[Quantized], weight: Quantized, i: int) -> Quantized:
    return FUSED_ROWS.gelu_rows(product(inputs[i], weight, None, torch.bfloat16))


def unscaled_then_gelu(inputs: list[Quantized], weight: Quantized, one: Tensor, i: int) -> Quantized:
    return FUSED_ROWS.gelu_rows(unscaled_product(inputs[i], weight, one, torch.bfloat16))


def one_kernel(inputs: list[Quantized], weight: Quantized, out_scale: float, tiling: Tiling, i: int) -> Quantized:
    return linear_gelu_rows(inputs[i], weight, out_scale, tiling)


def quantize_whole(x: Tensor) -> Quantized:
    """One scale for all of x."""
    scale = x.float().abs().amax() / LARGEST
    return Quantized((x.float() / scale).to(FP8), scale)


def graphed_us(run: Callable[[int], Any], copies: int, calls: int = 24) -> float:
    """Microseconds of one call, from a graph of many."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode():
        for i in range(copies):
            run(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        for i in range(calls):
            run(i % copies)
    return 1e3 * statistics.median(timed(graph.replay, 7)[2:]) / calls


def steps(engines: dict[str, Engine]) -> dict[str, dict[str, float]]:
    found = {}
    for patches in ROWS:
        found[str(patches)] = {title: round(us, 1) for title, us in step_us(patches, engines).items()}
        print(f"steps {patches:6d} {found[str(patches)]}", flush=True)
    return found


def step_us(patches: int, engines: dict[str, Engine]) -> dict[str, float]:
    base, fused = engines["bf16"].model.ops, FUSED_ROWS
    norm: Norm = engines["bf16"].model.vision_tower.encoder.blocks[1].norm1
    copies = num_copies(patches * 8192)

    def rows(width: int) -> list[Tensor]:
        return [torch.randn(patches, width, device="cuda").bfloat16() for _ in range(copies)]

    narrow, wide, attended = rows(1024), rows(4096), rows(1536)
    packed = [x.view(patches, 3, 12, 128) for x in rows(4608)]
    rope = torch.polar(*(torch.rand(patches, 64, device="cuda") for _ in range(2)))
    versions: dict[str, Callable[[int], Any]] = {
        "add_norm bf16": lambda i: base.add_norm(narrow[i], narrow[i - 1], norm),
        "add_norm_rows": lambda i: fused.add_norm_rows(narrow[i], narrow[i - 1], norm),
        "gelu bf16": lambda i: F.gelu(wide[i], approximate="tanh"),
        "gelu_rows": lambda i: fused.gelu_rows(wide[i]),
        "quantize_rows, L x 1536": lambda i: fused.quantize_rows(attended[i]),
        "rotate": lambda i: base.rotate(packed[i], rope),
        "quantize_heads": lambda i: quantize_heads(*packed[i].unbind(1)),
        "rotate and quantize_heads in one": lambda i: turn_and_quantize_heads(packed[i], rope),
    }
    return {title: graphed_us(run, copies) for title, run in versions.items()}


def errors(engines: dict[str, Engine]) -> dict[str, Any]:
    """On the mixed workload, whose segments all have their own length."""
    batch = make_batch(MIXED)
    exact = copy.deepcopy(engines["bf16"].model).float()
    exact.ops = PLAIN
    cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device="cuda")
    attend = ReferenceAttention().plan(batch.lengths, cu_seqlens)
    want, result = traced(exact, partial(exact, batch.pixel_values, batch.grids, attend))
    found = {}
    tested = {title: (engine.model, engine) for title, engine in engines.items()}
    by_tensor = copy.deepcopy(engines["bf16"].model)
    quantize(by_tensor, replace(PLAIN_ROWS, quantize_rows=rows_of_whole, **of_whole(by_tensor)))
    tested[TENSOR_ROUND] = (by_tensor, replace(engines["bf16"], model=by_tensor))
    for title, (model, engine) in tested.items():
        got, embeddings = traced(model, partial(replace(engine, graphs=None).forward, batch))
        blocks = [relative(g, w) for g, w in zip(got, want, strict=True)]
        items = [
            (relative(g, w), float(F.cosine_similarity(g.float(), w.float(), dim=-1).min()))
            for g, w in zip(split(embeddings, batch), split(result, batch), strict=True)
        ]
        found[title] = {
            "after_blocks": [round(value, 5) for value in blocks],
            "result": round(relative(embeddings, result), 5),
            "items": [round(value, 5) for value, _ in items],
            "least_cosine_of_a_token": round(min(cosine for _, cosine in items), 6),
        }
        print(
            f"error {title}: result {found[title]['result']}, largest item {max(i for i, _ in items):.5f}, "
            f"least cosine {found[title]['least_cosine_of_a_token']}\n  after blocks {found[title]['after_blocks']}",
            flush=True,
        )
    return found


def rows_of_whole(x: Tensor) -> Quantized:
    values, scale = quantize_whole(x)
    return Quantized(values, scale.expand(len(x), 1).contiguous())


def of_whole(model: nn.Module) -> dict[str, Any]:
    """The plain steps with one scale for a whole batch, to see what finer scales are worth."""

    def gelu_rows(x: Product) -> Quantized:
        return rows_of_whole(F.gelu(x.wide() if isinstance(x, Unscaled) else x.float(), approximate="tanh"))

    def add_norm_rows(x: Tensor, delta: Product | None, norm: Norm) -> Quantized:
        if delta is not None:
            x += delta.wide() if isinstance(delta, Unscaled) else delta
        return rows_of_whole(F.rms_norm(x.float(), norm.width, norm.weight.float(), norm.eps))

    return {"gelu_rows": gelu_rows, "add_norm_rows": add_norm_rows}


def traced(model: Any, run: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor]:
    """The residual stream after each block, and the result."""
    streams: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, inputs, __: streams.append(inputs[0].clone()))
        for block in model.vision_tower.encoder.blocks
    ]
    with torch.inference_mode():
        result = run()
    for hook in hooks:
        hook.remove()
    return streams, result


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def measure(name: str, engines: dict[str, Engine]) -> dict[str, Any]:
    batch: PackedBatch = make_batch(WORKLOADS[name][0])
    versions: dict[str, Callable[[], Tensor]] = {
        title: partial(engine.forward, batch) for title, engine in engines.items()
    }
    small = engines["bf16"].graphs
    if small is not None and small.fits(batch.lengths):  # attention in 8 bits is not in the graphs
        versions = {title: versions[title] for title in ("bf16", "products")}
    if sum(batch.lengths) > LONG_PATCHES:  # a second and more each
        versions.pop("attention", None)
    times = alternate(versions)
    median_ms = {title: round(statistics.median(values), 3) for title, values in times.items()}
    host = {title: round(host_ms(run, 1 if median_ms["bf16"] > LONG_MS else 7), 3) for title, run in versions.items()}
    result = {
        "patches": sum(batch.lengths),
        "attention": {title: engines[title].attention_for(batch.lengths) for title in versions},
        "median_ms": median_ms,
        "least_ms": {title: round(min(values), 3) for title, values in times.items()},
        "host_ms": host,
        "calls": {title: len(values) for title, values in times.items()},
        "bf16_over": {title: round(median_ms["bf16"] / ms, 3) for title, ms in median_ms.items()},
    }
    print(
        f"{name:22s} {result['attention']['bf16']:11s} {median_ms} bf16 over it {result['bf16_over']} host {host}",
        flush=True,
    )
    return result


def host_ms(run: Callable[[], Tensor], calls: int) -> float:
    """What the host needs to launch one call, while the device has nothing else to do."""
    spent = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        spent.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(spent)


def table(report: dict[str, Any]) -> dict[str, Any]:
    """For the README."""
    titles = ["bf16", "products", "attention", "both"]
    rows = [
        [name, *(f"{found['median_ms'][title]:.2f}" if title in found["median_ms"] else "" for title in titles)]
        for name, found in report["workloads"].items()
    ]
    return {"columns": ["batch", *(f"{title}, ms" for title in titles)], "rows": rows}


if __name__ == "__main__":
    main()

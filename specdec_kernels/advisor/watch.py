"""`watch`: a terminal view of speculation from a /metrics address, ours or vLLM's: rates between two scrapes."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_kernels.advisor.cli import guarded

NOTHING_FOUND = 1
# quantity -> (what it is, upper end of its bar); NaN where a window has nothing to divide by
SHOWN = {
    "conditional_acceptance": ("accepted / (accepted + rejections)", 1.0),
    "accepted_over_drafted": ("accepted / drafted", 1.0),
    "tokens_a_step": ("emitted a verification step", 8.0),
    "useful_token_ratio": ("emitted a verified node", 1.0),
    "slot_utilisation": ("real nodes / computed slots", 1.0),
    "prefix_hits": ("prompt tokens found in the prefix cache", 1.0),
    "realised_speedup": ("plain decoding's time / ours, by the policy's costs", 4.0),
    "tokens_a_second": ("emitted a second", 0.0),
}


def read_counters(text: str) -> dict[str, float]:
    """Sums over all labels by metric name, of the `specdec:` or `vllm:` counters in an exposition. Prefix removed;
    where both are present, ours. ValueError if it holds neither."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {"specdec:": {}, "vllm:": {}}
    for family in text_string_to_metric_families(text):
        prefix = next((p for p in found if family.name.startswith(p)), None)
        if prefix is None or family.type != "counter":
            continue
        for sample in family.samples:
            if sample.name.endswith("_total"):
                name = sample.name.removeprefix(prefix).removesuffix("_total")
                found[prefix][name] = found[prefix].get(name, 0.0) + sample.value
    chosen = found["specdec:"] or found["vllm:"]
    if not any(name.startswith("spec_decode") for name in chosen):
        raise ValueError("expected specdec: or vllm: counters of speculative decoding, got none")
    return chosen


def rates(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The quantities of SHOWN between two scrapes. A counter that went down was reset: it counts from 0 again."""

    def grown(name: str) -> float:
        value = after.get(name, 0.0) - before.get(name, 0.0)
        return value if value >= 0 else after.get(name, 0.0)

    def ratio(above: float, below: float) -> float:
        return above / below if below else float("nan")

    accepted, drafts = grown("spec_decode_num_accepted_tokens"), grown("spec_decode_num_drafts")
    emitted = grown("generation_tokens")
    ours = "spec_decode_num_steps" in after
    real, padded = grown("spec_decode_verify_slots_real"), grown("spec_decode_verify_slots_padded")
    return {
        # vLLM exports no rejections: its conditional rate cannot be told from its counters.
        "conditional_acceptance": ratio(accepted, accepted + grown("spec_decode_num_rejections")) if ours
        else float("nan"),
        "accepted_over_drafted": ratio(accepted, grown("spec_decode_num_draft_tokens")),
        "tokens_a_step": ratio(emitted, grown("spec_decode_num_steps")) if ours else 1 + ratio(accepted, drafts),
        "useful_token_ratio": ratio(emitted, real),
        "slot_utilisation": ratio(real, real + padded),
        "prefix_hits": ratio(grown("prefix_cache_hits"), grown("prefix_cache_queries")),
        "realised_speedup": ratio(
            grown("spec_decode_plain_equivalent_seconds"), grown("spec_decode_priced_seconds")
        ),
        "tokens_a_second": emitted / seconds,
    }  # fmt: skip


def bar(value: float, top: float, width: int = 30) -> str:
    """`value` on a scale from 0 to `top`."""
    if value != value:
        return "·" * width
    filled = round(width * min(1.0, max(0.0, value / top)))
    return "█" * filled + "·" * (width - filled)


def lines(found: Mapping[str, float], fastest: float) -> list[str]:
    """One line a quantity; speed is drawn against the fastest seen so far."""
    out = []
    for name, (what, top) in SHOWN.items():
        value, top = found[name], top or max(fastest, 1e-9)
        number = "     -" if value != value else f"{value:6.2f}"
        out.append(f"{name.replace('_', ' '):<24}{number}  {bar(value, top)}  {what}")
    return out


def scrape(url: str) -> dict[str, float]:
    """Counters at an address; OSError if it cannot be reached."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        return read_counters(reply.read().decode())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="specdec watch",
        description="Speculation live in the terminal, from a /metrics address (ours or vLLM's).",
        epilog="exit code: 0, 1 no such counters there, 2 wrong input or not reachable. "
        "Example: watch http://127.0.0.1:9464/metrics --interval 2 --count 5 --json",
    )
    parser.add_argument("url", help="e.g. http://127.0.0.1:9464/metrics")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between scrapes (default: %(default)s)")
    parser.add_argument("--count", type=int, default=0, help="stop after so many views (default: never)")
    parser.add_argument("--json", action="store_true", help="one JSON object a view")
    args = parser.parse_args(argv)

    def run() -> int:
        if args.interval <= 0 or not args.url.startswith(("http://", "https://")):
            raise ValueError(f"expected an http address and an interval > 0, got {args.url} and {args.interval}")
        try:
            return _watch(args)
        except urllib.error.URLError as error:
            raise OSError(f"{args.url}: {error.reason}") from None

    return guarded("watch", run)


def _watch(args: argparse.Namespace) -> int:
    try:
        before = scrape(args.url)
    except ValueError as error:
        print(f"watch: {args.url}: {error}", file=sys.stderr)
        return NOTHING_FOUND
    live: Any = None
    if not args.json and sys.stdout.isatty():
        from rich.live import Live

        live = Live(auto_refresh=False)
        live.start()
    fastest, shown, then = 0.0, 0, time.monotonic()
    try:
        while not args.count or shown < args.count:
            time.sleep(args.interval)
            after, now = scrape(args.url), time.monotonic()
            found = rates(before, after, now - then)
            before, then, shown = after, now, shown + 1
            fastest = max(fastest, found["tokens_a_second"])
            if args.json:
                print(json.dumps({k: None if v != v else v for k, v in found.items()}), flush=True)
            elif live is not None:
                live.update("\n".join(lines(found, fastest)), refresh=True)
            else:
                print("\n".join(lines(found, fastest)), end="\n\n", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        if live is not None:
            live.stop()
    return 0

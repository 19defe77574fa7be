"""What the nodes of a run lack, as they found it themselves: `trainwright status` shows it."""

import json
from typing import Any

from trainwright.follow.overview import Overview
from trainwright.node.run_paths import RunPaths


def node_findings(run: Overview) -> list[dict[str, Any]]:
    """Return each thing that nodes lack, once, with the nodes of each stage's newest attempt that lack it."""
    paths = RunPaths(run.run_dir)
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    if not paths.nxdt(1).is_dir():
        return []
    for stage in run.state.stages:
        for node in sorted(stage.nodes):
            file = paths.nxdt_findings(str(stage.stage), stage.attempt, node)
            if not file.exists():
                continue
            for finding in json.loads(file.read_text(encoding="utf-8"))["findings"]:
                nodes = found.setdefault((finding["what"], finding["remedy"]), {})
                nodes.setdefault(str(stage.stage), []).append(node)
    return [{"what": what, "remedy": remedy, "nodes": nodes} for (what, remedy), nodes in found.items()]


def as_line(finding: dict[str, Any]) -> str:
    """Return one of them in a line."""
    places = ", ".join(
        f"{stage} on node {nodes[0]}" if len(nodes) == 1 else f"{stage} on {len(nodes)} nodes"
        for stage, nodes in finding["nodes"].items()
    )
    return f"{finding['what']} ({places}); {finding['remedy']}"

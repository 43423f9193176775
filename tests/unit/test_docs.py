"""The README and the layout say what the code says."""

import ast
from pathlib import Path

from mlp_offload.flags import options_table

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "mlp_offload"

# Each room and what it may import of the package; every room may import errors and units.
ALLOWED = {
    "errors": set(),
    "units": set(),
    "telemetry": set(),
    "config": set(),
    "ranks": set(),
    "flags": {"config"},
    "plan": {"config", "flags"},
    "storage": {"_native"},
    "adam": {"_native"},
    "cuda": {"adam"},
    "transfers": {"adam", "cuda", "plan", "storage"},
    "records": {"plan", "storage"},
    "device_updates": {"adam", "config", "cuda", "plan", "records", "storage", "transfers"},
    "device_share": {"config", "plan", "tiers"},
    "rates": {"config", "storage"},
    "tiers": {"config", "plan", "rates", "records", "storage", "telemetry"},
    "opening": {"config", "plan", "ranks", "rates", "records", "storage", "tiers"},
    "balance": {"plan", "telemetry", "tiers"},
    "updates": {"adam", "device_updates", "plan", "records", "transfers"},
    "pipeline": {
        *("balance", "config", "device_share", "opening", "plan", "ranks", "records", "storage", "telemetry", "tiers"),
    },
    "virtual": {"config", "plan"},
    "virtual_updates": {"plan", "records", "virtual"},
    "simulator": {
        *("config", "opening", "pipeline", "plan", "ranks", "rates", "storage", "telemetry", "tiers", "virtual"),
        "virtual_updates",
    },
    "trace": {"telemetry"},
    "recipes": set(),
    "prediction": {"config", "plan", "simulator"},
    "snapshot": {"_native", "adam", "pipeline", "plan", "storage", "tiers", "updates"},
    "startup": {"adam", "ranks", "storage", "tiers"},
    "report": {"telemetry"},
    "checkpoint": set(),
    "optimizer": {
        *("adam", "config", "device_updates", "pipeline", "plan", "ranks", "startup", "telemetry", "transfers"),
        "updates",
    },
    "megatron": {
        *("adam", "checkpoint", "config", "optimizer", "pipeline", "plan", "startup", "storage", "telemetry", "tiers"),
        *("device_updates", "flags", "ranks", "report", "snapshot", "transfers", "updates"),
    },
    "cli": {
        *("config", "megatron", "plan", "prediction", "recipes", "report", "simulator", "storage", "telemetry"),
        "trace",
    },
    "__init__": {"config", "optimizer"},
    "__main__": {"cli"},
}

NEED_NO_TORCH = {
    *("config", "errors", "plan", "prediction", "recipes", "report", "simulator", "storage", "telemetry", "units"),
    *("virtual", "virtual_updates"),
}


def imports(file):
    """Rooms of the package and top-level modules that a file imports, anywhere in it."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module.split(".")]
        elif isinstance(node, ast.ImportFrom):
            base = ["mlp_offload", *parts[: len(parts) - node.level]]
            names = [base + node.module.split(".")] if node.module else [base + [a.name] for a in node.names]
        else:
            continue
        for name in names:
            if name[0] == "mlp_offload" and len(name) == 1:
                names_after = [[alias.name] for alias in node.names]
                yield from (("room", n[0]) for n in names_after)
            elif name[0] == "mlp_offload":
                yield "room", name[1]
            else:
                yield "module", name[0]


def test_the_readme_shows_the_options_as_they_are():
    assert options_table() in (REPOSITORY / "README.md").read_text()


def test_imports_go_one_way():
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        found = list(imports(file))
        rooms = {name for kind, name in found if kind == "room"} - {room, "errors", "units", "__version__"}
        assert rooms <= ALLOWED[room], f"{file}: imports {rooms - ALLOWED[room]}"
        modules = {name for kind, name in found if kind == "module"}
        if room in NEED_NO_TORCH:
            assert "torch" not in modules, f"{file}: needs no torch"
        if room != "megatron":
            assert "megatron" not in modules, f"{file}: only the megatron room imports Megatron"

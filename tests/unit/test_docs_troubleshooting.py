"""The troubleshooting page quotes messages that the program really has."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.+)$", PAGE, re.MULTILINE)


def texts(node):
    """The text of a string expression, with a mark where values go in; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]", "\0", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
    return None


@pytest.fixture(scope="module")
def source():
    files = [*(REPOSITORY / "mlp_offload").rglob("*.py")]
    return [text for f in files for node in ast.walk(ast.parse(f.read_text())) if (text := texts(node))]


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_source(source, message):
    pieces = [piece.strip(" .:'(") for piece in message.split("…")]
    for piece in (p for p in pieces if len(p) > 6):
        assert any(piece in text for text in source), f"no message has {piece!r}"


def test_the_page_quotes_messages_at_all():
    assert len(QUOTED) > 30

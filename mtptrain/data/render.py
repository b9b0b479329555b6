"""Documents as people read them: which tokens are supervised, on the console, as plain text and as HTML."""

import html
from collections.abc import Iterator, Sequence

from rich.text import Text

from mtptrain.data.documents import Document
from mtptrain.data.template import ChatTemplate
from mtptrain.visible import visible

OPEN, CLOSE = "⟦", "⟧"
_STYLE = """
body { font: 14px/1.5 monospace; white-space: pre-wrap; margin: 2em }
h2 { font-size: 14px; white-space: normal }
mark { background: #bfe8bf; color: #053b05 }
"""


def runs(document: Document) -> Iterator[tuple[bool, list[int]]]:
    """(supervised, ids) of the alternating stretches of a document, in order; each span is a stretch of its own."""
    at = 0
    for start, end in document.spans:
        if at < start:
            yield False, document.tokens[at:start]
        yield True, document.tokens[start:end]
        at = end
    if at < len(document.tokens):
        yield False, document.tokens[at:]


def coloured(document: Document, template: ChatTemplate) -> Text:
    """For the console: supervised text in green. Data can't style or control the terminal."""
    text = Text()
    for supervised, ids in runs(document):
        text.append(visible(template.decode(ids)), style="bold green" if supervised else "dim")
    return text


def samples_text(documents: Sequence[Document], template: ChatTemplate) -> str:
    """Plain text; supervised stretches stand between ⟦ and ⟧."""
    parts = [f"Supervised tokens stand between {OPEN} and {CLOSE}.\n"]
    for document in documents:
        body = "".join(
            f"{OPEN}{text}{CLOSE}" if supervised else text for supervised, ids in runs(document) for text in [visible(template.decode(ids))]
        )
        parts.append(f"--- {visible(_title(document))}\n{body}\n")
    return "\n".join(parts)


def samples_html(documents: Sequence[Document], template: ChatTemplate) -> str:
    """One self-contained page; supervised stretches are marked green. All text is escaped."""
    parts = [f"<!doctype html><meta charset=utf-8><title>mtptrain samples</title><style>{_STYLE}</style>"]
    for document in documents:
        parts.append(f"<h2>{html.escape(visible(_title(document)))}</h2>")
        for supervised, ids in runs(document):
            text = html.escape(visible(template.decode(ids)))
            parts.append(f"<mark>{text}</mark>" if supervised else f"<span>{text}</span>")
    return "".join(parts) + "\n"


def _title(document: Document) -> str:
    supervised = sum(end - start for start, end in document.spans)
    return f"{document.id} ({document.source}, {document.split}): {len(document.tokens)} tokens, {supervised} supervised"

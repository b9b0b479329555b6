"""Text of unknown origin made safe to look at: control characters become their pictures."""

_PICTURES = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"} | {127: "\u2421"} | dict.fromkeys(range(128, 160), "\ufffd")


def visible(text: str) -> str:
    """Control characters, other than newline and tab, as their pictures, so that no escape sequence reaches a terminal."""
    return text.translate(_PICTURES)

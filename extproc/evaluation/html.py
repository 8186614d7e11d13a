"""HTML and SVG as a tree, so that no text can become markup; it knows no evaluation."""

from __future__ import annotations

from typing import TypeAlias
from xml.etree import ElementTree as ET

Node: TypeAlias = "ET.Element | str | None"
"""None: nothing there."""


def el(tag: str, *children: Node, **attributes: object) -> ET.Element:
    """`class_` is `class`, `stroke_width` is `stroke-width`; an attribute of None is left out."""
    element = ET.Element(
        tag,
        {
            name.rstrip("_").replace("_", "-"): str(value)
            for name, value in attributes.items()
            if value is not None
        },
    )
    for child in children:
        add(element, child)
    return element


def add(element: ET.Element, child: Node) -> None:
    if isinstance(child, ET.Element):
        element.append(child)
    elif child is not None:
        if len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child


def page(root: ET.Element) -> str:
    """The tree as a document; it escapes every text and attribute."""
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"

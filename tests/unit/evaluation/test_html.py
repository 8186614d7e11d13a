"""A tree of elements into a document."""

from extproc.evaluation.html import el, page


def test_children_texts_and_attributes_are_escaped_in_order():
    tree = el("p", "a<b ", None, el("b", "&"), " c", " d", class_="x", aria_label='"', id=None)
    assert page(tree) == (
        '<!doctype html>\n<p class="x" aria-label="&quot;">a&lt;b <b>&amp;</b> c d</p>\n'
    )

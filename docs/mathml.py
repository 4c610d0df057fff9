"""A build hook: TeX between dollar signs becomes MathML, which browsers render without any script or network."""

import html
import re

from latex2mathml.converter import convert

_MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content, **_):
    """Replace every formula of a rendered page."""

    def mathml(match):
        display = "block" if match[2] == "[" else "inline"
        formula = convert(html.unescape(match[3]).strip(), display=display)
        return f'<div class="formula">{formula}</div>' if display == "block" else formula

    return _MATHS.sub(mathml, content)

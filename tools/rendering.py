"""A hook of mkdocs (mkdocs.yml): formulas as MathML, which needs no script and no network, and names that wrap well.

pymdownx.arithmatex finds $...$ and $$...$$ in the Markdown. GitHub renders the same notation.
"""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.+?)\\[)\]]\s*</\1>', re.DOTALL)
INLINE_CODE = re.compile(r"(?<!<pre>)(?<!<pre><span></span>)<code>([^<]+)</code>")
WORD = re.compile(r"\S+")
WHOLE = 18  # characters of a name that stays on one line; with that all tables fit a page of 1280 pixels
BREAK = re.compile(r"(?<=\w[./,])(?=\w{4})|(?<=\w{24}_)(?=\w)")


def mathml(formula: re.Match) -> str:
    """Return MathML for arithmatex' element of a formula."""
    tag, latex = formula.groups()
    found = convert(html.unescape(latex), display="block" if tag == "div" else "inline")
    return found.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em" />')


def breakable(code: re.Match) -> str:
    """Return inline code with each name in a span, or a long name's parts in spans with <wbr> between them.

    docs/stylesheets/extra.css keeps the spans whole. A browser would break a flag after its first hyphen, and in a
    table a metric's name anywhere.
    """

    def spans(word: re.Match) -> str:
        parts = BREAK.split(word[0]) if len(word[0]) > WHOLE else [word[0]]
        return "<wbr>".join(f"<span>{part}</span>" for part in parts)

    return f"<code>{WORD.sub(spans, code[1])}</code>"


def on_page_content(content: str, **_) -> str:
    """Return the page's HTML with both."""
    return INLINE_CODE.sub(breakable, FORMULA.sub(mathml, content))

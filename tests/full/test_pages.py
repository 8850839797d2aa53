"""Every page of the docs in a real browser, 1280 pixels wide: it fits its column, and it needs no network."""

import os
import shutil
import subprocess
import sys

import pages
import pipeline
import pytest

# A fault, and the words that name it.
PLANTS = {
    "table": (f"<table><tr>{'<td>unbreakable_word</td>' * 9}</tr></table>", 'pixels too wide: table "unbreakable_word'),
    "code": (f"<pre><code>{'word ' * 40}</code></pre>", 'pixels too wide: pre "word word'),
    "text": (f"<p style='white-space: nowrap'>{'word ' * 40}</p>", 'pixels too wide: p "word'),
    "picture": ('<img src="assets/images/favicon.png" style="width: 900px; max-width: none">', "pixels too wide: img"),
    "formula": (f"<math display='block'>{'<mi>r</mi><mo>+</mo>' * 80}</math>", 'pixels too wide: math "r+r'),
    "latex": (r"<p>a \(c_low\) that stayed LaTeX</p>", r"not rendered: a \(c_low\)"),
    "dollars": ("<p>a $c_low$ that stayed Markdown</p>", "not rendered: a $c_low$"),
    "missing": ('<img src="pictures/missing.png">', "not loaded: pictures/missing.png"),
    "network": ('<img src="http://127.0.0.1:9/picture.png">', "not in the site: http://127.0.0.1:9/picture.png"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built docs. The browser is installed where that is possible; CI must have one."""
    command = ["bash", pipeline.REPOSITORY / "scripts/setup_browser.sh"]
    setup = subprocess.run(command, text=True, capture_output=True)
    output = (setup.stdout + setup.stderr).strip()
    if setup.returncode and "CI" not in os.environ:
        pytest.skip(f"no browser: {output}")
    assert setup.returncode == 0, output
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", directory],
        cwd=pipeline.REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return directory


def test_every_page_of_the_docs_fits_its_column_and_needs_no_network(site):
    found = pages.find_faults(site)
    assert len(found) == len(list((pipeline.REPOSITORY / "docs").rglob("*.md")))
    assert {page: faults for page, faults in found.items() if faults} == {}


def test_each_kind_of_fault_is_named(site, tmp_path):
    shutil.copytree(site / "assets", tmp_path / "assets")
    page = (site / "index.html").read_text()
    for name, (fault, _) in PLANTS.items():
        (tmp_path / f"{name}.html").write_text(page.replace("</h1>", f"</h1>{fault}", 1))
    found = pages.find_faults(tmp_path)
    assert found.keys() == {f"{name}.html" for name in PLANTS}
    for name, (_, words) in PLANTS.items():
        assert any(words in fault for fault in found[f"{name}.html"]), (name, found)

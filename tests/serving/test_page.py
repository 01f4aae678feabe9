"""The page: served as it should be, whole, and used in a real browser where there is one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttmem import Memory, Model
from ttmem.serving.web_page import FOLDER, TYPES

from .browser import browser, missing
from .conftest import ALICE, TEXTS, Server, running

FILES = sorted(path.name for path in FOLDER.iterdir())
POLICY = {"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'"}


def test_every_file_is_served_with_its_type_and_policy(server: Server) -> None:
    client = server.http()
    answers = {"/": "text/html; charset=utf-8"} | {
        f"/page/{name}": TYPES[Path(name).suffix] for name in FILES if name != "index.html"
    }
    for path, kind in answers.items():
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"] == kind
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy.items() >= POLICY.items()
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code in (200, 304)
        assert client.head(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/index.html",
        "/page/nothing.js",
        "/page/../web_page.py",
        "/page/%2e%2e/web_page.py",
        "/page/..%2fweb_page.py",
        "/page//etc/passwd",
        "/page/%00",
        "/index.html",
        "/docs",
    ],
)
def test_nothing_else_is_served(server: Server, path: str) -> None:
    answer = server.http().get(path)
    assert answer.status_code == 404, path
    assert answer.json()["error"]["code"] == "http_error"


def test_the_api_is_as_it_was(server: Server) -> None:
    client = server.http()
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.post("/v1/nothing").status_code == 404
    assert client.post("/").status_code == 405


def test_the_page_can_be_left_out(
    tmp_path: Path, make_settings: Callable[..., Any], served: Model, key_file: Path
) -> None:
    with running(make_settings(tmp_path / "without", page=False), served) as without:
        assert without.http().get("/").status_code == 404
        assert without.http().get("/page/app.js").status_code == 404
    own = tmp_path / "own"
    own.mkdir()
    (own / "index.html").write_text("<p>mine</p>")
    with running(make_settings(tmp_path / "another", static=own), served) as another:
        assert another.http().get("/").text == "<p>mine</p>"
        assert another.http().get("/page/app.js").status_code == 404


def test_files_refer_to_files_that_are_there() -> None:
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        if name.endswith(".js"):
            imports = re.findall(r'from "([^"]+)"', text)
            assert len(imports) == len(re.findall(r"^import ", text, re.M))
            for target in imports:
                assert target.startswith("./")
                assert target[2:] in FILES
            for names, target in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
                source = (FOLDER / target).read_text(encoding="utf-8")
                for each in names.split(","):
                    assert re.search(rf"export (async )?(const|class|function\*?) {each.strip()}\b", source), each
        elif name.endswith(".html"):
            for target in re.findall(r'(?:src|href)="([^"#]+)"', text):
                assert target.removeprefix("page/") in FILES
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", text)  # the policy forbids them
        without_names = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", without_names), name


def test_every_element_that_scripts_ask_for_is_in_the_page() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for name in FILES:
        if name.endswith(".js"):
            for asked in re.findall(r'find\("([^"]+)"\)', (FOLDER / name).read_text(encoding="utf-8")):
                assert asked in ids, (name, asked)
    for target in re.findall(r'(?:\sfor|aria-labelledby|aria-describedby)="([^"]+)"', page):
        assert target in ids, target
    labelled = set(re.findall(r'<label[^>]*\sfor="([^"]+)"', page)) | set(
        re.findall(r'<label[^>]*><input id="([^"]+)"', page)
    )
    assert set(re.findall(r'<(?:input|select|textarea)\s+id="([^"]+)"', page)) <= labelled


# In a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with browser() as driver:
        yield driver


class Page:
    """What a person does with the page."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        driver.get("about:blank")
        driver.get(url)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """What is seen of an element; nothing where it is not there."""
        found = self.driver.find_elements("css selector", selector)
        return str(found[0].text) if found else ""

    def until(self, holds: Callable[[], Any], seconds: float = 120) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                found = holds()
            except StaleElementReferenceException:
                found = None
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(self.text("body"))

    def fill(self, selector: str, value: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(value)

    def check(self, selector: str, wanted: bool) -> None:
        if self.find(selector).is_selected() != wanted:
            self.find(selector).click()

    def open(self, name: str) -> None:
        rows = self.until(lambda: [row for row in self.items() if name in row.text])
        rows[0].click()
        self.until(lambda: self.text("#detail-title") == name)

    def items(self) -> list[Any]:
        return list(self.driver.find_elements("css selector", "#list .item"))

    def focused(self) -> str:
        return str(self.driver.execute_script("return document.activeElement.id || document.activeElement.className"))

    def complaints(self) -> list[str]:
        """What the browser has to say of scripts and of the policy; refused requests are told to the user."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if "Failed to load resource" not in entry["message"]]


@pytest.fixture
def page(chromium: Any, server: Server) -> Iterator[Page]:
    chromium.get_log("browser")
    page = Page(chromium, server.url)
    page.until(lambda: page.text("#model") == "tiny")
    yield page
    assert page.complaints() == []


def figures(page: Page, kind: str) -> dict[str, str]:
    found = page.driver.find_elements("css selector", f"#answer-{kind} dd")
    return {element.get_attribute("data-figure"): element.text for element in found}


def ask(page: Page, question: str) -> None:
    page.driver.execute_script("document.getElementById('length').value = 12")
    page.fill("#question", question)
    page.find("#ask-button").click()
    page.until(lambda: page.find("#ask-button").is_enabled() and not page.text("#stop"))


def test_a_question_to_both(page: Page, served: Model, memories: dict[str, Memory], make_full: Any) -> None:
    from ttmem.conversation import Conversation
    from ttmem.serving.description import full_bytes

    page.open("ferry")
    page.until(lambda: "entries for" in page.text("#budget"))
    ask(page, "When does it leave?")
    memory = memories["ferry"]
    for kind, asked in (("memory", memory), ("full", make_full(served, TEXTS["ferry"]))):
        expected = Conversation(served, asked, max_new_tokens=12).say("When does it leave?")
        shown = page.driver.execute_script(f"return document.querySelector('#answer-{kind} .answer').textContent")
        assert shown == (expected or "(nothing)")
        assert re.fullmatch(r"[\d.]+ (ms|s)", figures(page, kind)["wait"])
        assert re.fullmatch(r"[\d.,]+|–", figures(page, kind)["speed"])
    parts = [part for layer in memory.compacted for part in (layer.keys, layer.values, layer.biases)]
    held = sum(part.numel() * part.element_size() for part in parts)
    assert figures(page, "memory")["bytes"] == f"{held / 1000:.1f} kB"
    assert figures(page, "full")["bytes"] == f"{full_bytes(memory) / 1000:.1f} kB"
    read = {kind: int(figures(page, kind)["read"]) for kind in ("memory", "full")}
    assert read["full"] - read["memory"] == memory.document_length


def test_the_heat_map_has_a_cell_per_head_and_the_numbers_beside_it(page: Page, memories: dict[str, Memory]) -> None:
    page.open("lamps")
    cells = page.until(lambda: page.driver.find_elements("css selector", ".heat rect"))
    assert len(cells) == sum(layer.num_heads for layer in memories["lamps"].compacted)
    titles = [page.driver.execute_script("return arguments[0].textContent", cell) for cell in cells]
    kept = [length for layer in memories["lamps"].compacted for length in layer.lengths]
    assert [int(title.rpartition(" ")[2]) for title in titles] == kept
    assert page.find(".heat svg").get_attribute("aria-label").startswith("Entries kept")
    page.find("#budget input[value='Mean bias']").click()
    assert page.find(".heat svg").get_attribute("aria-label").startswith("Mean bias")


def test_without_its_document_a_memory_answers_alone(
    page: Page, server: Server, memories: dict[str, Memory], tmp_path: Path
) -> None:
    memories["ferry"].save(tmp_path / "alone.ttmem", keep_document=False)
    server.bring(tmp_path / "alone.ttmem", "alone")
    page.driver.refresh()
    page.open("alone")
    assert not page.find("#compare").is_enabled()
    ask(page, "Who?")
    assert "was not kept" in page.text("#answer-full .answer")
    assert figures(page, "memory")["read"] != "–"
    server.http().delete("/v1/memories/alone")


def test_an_error_is_shown_in_the_apis_words(page: Page, server: Server) -> None:
    page.find("#compact").click()
    assert page.text("#new-problem") == "Choose a document, or paste its text."
    page.find("#paste summary").click()
    page.fill("#text", TEXTS["lamps"])
    page.fill("#name", "ferry")
    page.fill("#ratio", "2")
    page.find("#compact").click()
    page.until(lambda: "there is a memory of this name" in page.text("#new-problem"))
    assert page.find("#new-problem").get_attribute("role") == "alert"
    page.fill("#name", "two words")
    page.find("#compact").click()
    page.until(lambda: "name: " in page.text("#new-problem"))
    assert page.find("#compact").is_enabled()
    page.open("ferry")
    page.driver.execute_script("document.getElementById('length').value = 4097")
    page.fill("#question", "Who?")
    page.find("#ask-button").click()
    page.until(lambda: "up to 4096 tokens" in page.text("#answer-memory .answer"))


@pytest.mark.slow
def test_a_document_is_uploaded_followed_asked_and_deleted(page: Page, server: Server, tmp_path: Path) -> None:
    document = tmp_path / "harbour.txt"
    document.write_text(TEXTS["ferry"] + " " + TEXTS["lamps"])
    page.find("#file").send_keys(str(document))
    page.fill("#name", "harbour")
    page.fill("#ratio", "3")
    page.driver.execute_script("document.getElementById('preset').value = 'quick'")
    page.check("#measure", False)
    page.find("#compact").click()
    page.until(lambda: page.text("#detail-title") == "harbour")
    stages = set[str]()

    def ready() -> bool:
        rows = page.driver.find_elements("css selector", ".stages li span:first-child")
        stages.update(row.text for row in rows)
        return page.text("#detail-status") == "ready"

    page.until(ready, 240)
    assert "teacher rollouts" in stages
    page.until(lambda: "entries for" in page.text("#budget"))
    ask(page, "Who lights the lamps?")
    assert int(figures(page, "full")["read"]) > int(figures(page, "memory")["read"])
    page.find("#delete").click()
    page.until(lambda: page.focused() == "confirm-no")
    from selenium.webdriver.common.keys import Keys

    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)  # a no
    page.until(lambda: not page.find("#confirm").is_displayed())
    assert server.http().get("/v1/memories/harbour").status_code == 200
    page.find("#delete").click()
    page.find("#confirm-yes").click()
    page.until(lambda: not page.find("#detail").is_displayed())
    assert server.http().get("/v1/memories/harbour").status_code == 404
    assert all("harbour" not in row.text for row in page.items())
    assert page.focused() == "memories"


@pytest.mark.slow
def test_a_job_is_cancelled_and_its_losses_drawn(page: Page, server: Server) -> None:
    body = {"text": TEXTS["ferry"], "name": "long", "tokens": 8, "preset": "paper", "measure": False}
    settings = {"rollouts": 2, "rollout_tokens": 3, "top_k": 4, "pool": 32, "fit_positions": 8}
    id = server.http().post("/v1/memories", json={**body, "settings": settings}).json()["id"]
    page.driver.refresh()
    page.open("long")
    page.until(lambda: "updates; lowest" in page.text("#curves"), 240)
    assert "updates; lowest" in page.find("#curves svg").get_attribute("aria-label")
    page.find("#cancel").click()
    page.until(lambda: page.text("#detail-status").startswith("cancelled"))
    assert not page.find("#cancel").is_displayed()
    server.http().delete(f"/v1/memories/{id}")


def test_by_keyboard_alone(page: Page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.driver.refresh()
    page.until(lambda: page.items())
    seen = list[str]()
    for _ in range(30):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        seen.append(page.focused())
        outline = page.driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline not in ("none", ""), seen
        if seen[-1] == "item":
            break
    assert seen[0] == "skip"
    order = [name for name in seen if name in ("file", "name", "ratio", "preset", "keep", "measure", "compact", "item")]
    assert order == ["file", "name", "ratio", "preset", "keep", "measure", "compact", "item"]
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.focused() == "detail-title")


def test_with_a_key(chromium: Any, keyed: Server) -> None:
    page = Page(chromium, keyed.url)
    page.until(lambda: "valid API key" in page.text("#problem"))
    page.until(lambda: page.focused() == "key")
    page.fill("#key", ALICE)
    page.find("#key-form button").click()
    page.until(lambda: page.text("#problem") == "")
    page.open("ferry")
    page.until(lambda: "entries for" in page.text("#budget"))
    page.driver.refresh()  # the key is kept while the tab is open, and what is open is in its address
    page.until(lambda: page.text("#detail-title") == "ferry")
    assert ALICE not in page.driver.current_url + page.driver.page_source
    page.driver.execute_script("sessionStorage.clear()")
    chromium.get_log("browser")


def test_on_a_narrow_screen_in_the_dark(server: Server) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with browser(360, 740, dark=True) as driver:
        page = Page(driver, server.url)
        page.open("ferry")
        page.until(lambda: "entries for" in page.text("#budget"))
        ask(page, "Who?")
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 360
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert all(int(part) < 60 for part in re.findall(r"\d+", ground))
        assert page.complaints() == []

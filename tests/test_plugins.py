"""Plugins: modules of users are imported once, from where the user stands, and named when they fail."""

import sys
from importlib.metadata import EntryPoint

import pytest

import simic
from simic import plugins
from simic.plugins import PluginError, load_plugins, loaded_plugins, plugin_files
from simic.tasks.registry import TASKS, find_task

PLUGIN = """
import simic

@simic.task("from_plugin")
def mine():
    from helpers import tiny_run
    return tiny_run.make_task()
"""


@pytest.fixture(autouse=True)
def fresh(own_names, monkeypatch, tmp_path):
    """No plugin is loaded yet, and the test stands in an empty directory."""
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)


def test_what_a_plugin_registers_is_found_by_name(tmp_path):
    (tmp_path / "registered_here.py").write_text(PLUGIN)
    assert "from_plugin" not in TASKS
    simic.load_plugins(["registered_here"])
    load_plugins(["registered_here"])  # once only: nothing is registered twice
    assert find_task("from_plugin").name == "from_plugin"
    assert loaded_plugins() == ("registered_here",)
    assert plugin_files() == (tmp_path / "registered_here.py",)


def test_an_installed_package_announces_its_plugins(tmp_path, monkeypatch):
    (tmp_path / "announced.py").write_text(PLUGIN)
    point = EntryPoint("tasks", "announced:register", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == plugins.GROUP else [])
    load_plugins()
    assert loaded_plugins() == ("announced",)
    assert "from_plugin" in TASKS


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no plugin module 'broken': name it as in an import statement"),
        ("import no_such_module", "plugin broken needs the module no_such_module, which is not installed"),
        ("1 / 0", r"plugin broken failed while it was imported \(ZeroDivisionError: division by zero\)"),
        ("import simic\nsimic.task('mlp')(print)", "a task family named 'mlp' exists already"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_the_reason(tmp_path, source, message):
    if source is not None:
        (tmp_path / "broken.py").write_text(source)
    with pytest.raises(PluginError, match=message):
        load_plugins(["broken"])
    assert loaded_plugins() == ()

"""docs/query.md documents the tables as they are."""

import re
from pathlib import Path

from simic.telemetry.tables import schemas

PAGE = Path(__file__).parents[2] / "docs" / "query.md"


def test_every_table_and_column_is_documented_with_its_type_and_meaning():
    documented: dict[str, list[tuple[str, str, str]]] = {}
    for table, text in re.findall(r"(?ms)^### `(\w+)`\n(.*?)(?=^###? |\Z)", PAGE.read_text(encoding="utf-8")):
        documented[table] = re.findall(r"(?m)^\| `([^`]+)` \| `([^`]+)` \| (.*) \|$", text)
    assert documented == {name: [tuple(column) for column in table.columns] for name, table in schemas().items()}

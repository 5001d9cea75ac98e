"""The tables of events: every kind and field has its place, its type and a sentence."""

from dataclasses import fields

from simic.telemetry.events import KINDS, EpisodeEvent, EpisodeTrace, PhaseTimings, Update
from simic.telemetry.tables import NAMES, TYPES, schemas


def test_every_column_says_what_it_holds():
    for name, table in schemas().items():
        assert table.help.endswith("."), name
        for column in table.columns:
            assert column.help.endswith("."), f"{name}.{column.name}"
        names = [column.name.lower() for column in table.columns]
        assert len(set(names)) == len(names)


def test_every_field_of_an_event_is_a_column_of_the_table_of_its_kind():
    for kind, cls in KINDS.items():
        if cls not in (Update, EpisodeTrace, PhaseTimings):  # these are spread over rows
            columns = [column.name for column in schemas()[NAMES.get(kind, kind)].columns]
            own = [field.name for field in fields(cls)]
            assert columns[-len(own) :] == own
            assert columns[: -len(own)] == (["run", "host"] if issubclass(cls, EpisodeEvent) else ["run"])


def test_types_follow_from_the_fields():
    types = {column.name: column.type for column in schemas()["episodes"].columns}
    assert types["operations"] == "MAP(VARCHAR, BIGINT)"
    assert types["rolled_back"] == "BOOLEAN"
    assert {column.type for table in schemas().values() for column in table.columns} <= {
        *TYPES.values(),
        "JSON",
        "TIMESTAMP",
    }

"""Groups of controllers: rows, members, and which pairs are compared."""

from simic.evaluation.groups import Groups

CONTROLLERS = {
    **{label: {"kind": "learned", "of": None, "description": label} for label in ("a", "b", "alone")},
    "wait": {"kind": "wait", "of": None, "description": "never grows"},
}
GROUPS = Groups(CONTROLLERS, {"ours": {"kind": "learned", "of": None, "members": ["a", "b"]}})


def test_a_group_takes_the_place_of_its_members():
    assert GROUPS.owner == {"a": "ours", "b": "ours"}
    assert GROUPS.members("ours") == ("a", "b")
    assert GROUPS.members("alone") == ("alone",)
    assert sorted(GROUPS.rows([*CONTROLLERS, "ours"])) == ["alone", "ours", "wait"]
    assert sorted(GROUPS.learned(["wait", "ours", "alone"])) == ["alone", "ours"]
    assert (GROUPS.kind("ours"), GROUPS.kind("wait")) == ("learned", "wait")


def test_a_group_is_not_compared_with_its_own_members():
    assert GROUPS.comparable("ours", "wait")
    assert not GROUPS.comparable("ours", "a")

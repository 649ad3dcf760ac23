import numpy as np
import pytest

from headrace.compat.named_sharding import NamedSharding
from headrace.errors import ConfigError

AXES = ["data_parallel", "pipeline_parallel", "tensor_parallel"]


@pytest.fixture
def mesh():
    return NamedSharding(np.arange(12).reshape(2, 3, 2), AXES)


def test_sizes_and_names_are_those_of_the_layout(mesh):
    assert mesh.shape == {"data_parallel": 2, "pipeline_parallel": 3, "tensor_parallel": 2}
    assert mesh.names == AXES
    assert (mesh.ndim, mesh.size) == (3, 12)
    assert mesh.get_axis_size("pipeline_parallel") == 3
    assert mesh.get_axis_index("tensor_parallel") == 2


def test_the_layout_handed_out_is_a_copy(mesh):
    mesh.layout[0, 0, 0] = 99
    mesh.names.clear()
    assert mesh.layout[0, 0, 0] == 0
    assert mesh.names == AXES


def test_ranks_at_some_coordinates_keep_the_other_axes(mesh):
    row = mesh.get_ranks(data_parallel=1, pipeline_parallel=2)
    assert row == NamedSharding([10, 11], ["tensor_parallel"])
    assert mesh.get_ranks() == mesh


def test_ranks_at_all_coordinates_are_one_number(mesh):
    rank = mesh.get_ranks(data_parallel=1, pipeline_parallel=0, tensor_parallel=1)
    assert type(rank) is int
    assert rank == 7


def test_every_rank_is_found_at_its_coordinates(mesh):
    for rank in range(12):
        assert mesh.get_ranks(**mesh.get_worker_coords(rank)) == rank


def test_ranks_by_coordinate_are_a_sorted_list(mesh):
    assert mesh.get_ranks_by_coord(tensor_parallel=1) == [1, 3, 5, 7, 9, 11]
    assert mesh.get_ranks_by_coord(data_parallel=0, pipeline_parallel=1, tensor_parallel=0) == [2]
    assert mesh.get_ranks_by_coord(data_parallel=2) == []


def test_a_nested_list_and_whole_floats_are_layouts():
    assert NamedSharding([[3.0, 1.0]], ["a", "b"]).layout.tolist() == [[3, 1]]


def test_an_unknown_axis_is_refused_with_the_known_ones(mesh):
    message = "axis 'expert' is unknown; the axes are data_parallel, pipeline_parallel, tensor_parallel"
    for act in (
        lambda: mesh.get_ranks(expert=0),
        lambda: mesh.get_axis_size("expert"),
        lambda: mesh.get_axis_index("expert"),
        lambda: mesh.get_ranks_by_coord(expert=0),
    ):
        with pytest.raises(ConfigError, match=message):
            act()


@pytest.mark.parametrize("coordinate", [-1, 3])
def test_a_coordinate_outside_its_axis_is_refused_by_name(mesh, coordinate):
    with pytest.raises(IndexError, match=f"axis 'pipeline_parallel' has size 3; got coordinate {coordinate}"):
        mesh.get_ranks(pipeline_parallel=coordinate)


def test_a_rank_that_is_not_there_is_refused(mesh):
    with pytest.raises(ConfigError, match="rank 12 is not in the layout of 12 ranks"):
        mesh.get_worker_coords(12)


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1], [2]], ["a", "b"], "ragged"),
        ([[0, 1]], ["a"], "2 axes and 1 names"),
        ([[0, 1]], ["a", "a"], "repeat"),
        ([0, 1, 1], ["a"], r"ranks \[1\] stand in the layout more than once"),
        ([0.5], ["a"], "expected integer ranks"),
        (["x"], ["a"], "expected integer ranks"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout, names, message):
    with pytest.raises(ConfigError, match=message):
        NamedSharding(layout, names)


def test_arrangements_compare_by_ranks_and_names():
    assert NamedSharding([0, 1], ["a"]) == NamedSharding([0, 1], ["a"])
    assert NamedSharding([0, 1], ["a"]) != NamedSharding([1, 0], ["a"])
    assert NamedSharding([0, 1], ["a"]) != NamedSharding([0, 1], ["b"])
    assert NamedSharding([0, 1], ["a"]) != [0, 1]

import pytest

from mlp_offload.errors import ConfigError
from mlp_offload.ranks import RankContext, first_host, rank_context, settle, tasks_on_node

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}


def test_torchrun_variables_stay_as_they_are():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **STEP}
    before = dict(environment)
    assert settle(environment) == "torchrun"
    assert environment == before


def test_a_task_of_an_srun_step_gets_its_rank_from_slurm():
    environment = dict(STEP)
    assert settle(environment) == "srun"
    expected = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "gpu007"}
    assert expected.items() <= environment.items()
    assert 20000 <= int(environment["MASTER_PORT"]) < 40000


def test_all_tasks_of_a_step_meet_at_one_port_and_steps_at_different_ones():
    def port(**changes):
        environment = {**STEP, **changes}
        settle(environment)
        return environment["MASTER_PORT"]

    assert port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0") == port()
    assert port(SLURM_STEP_ID="3") != port()


def test_a_port_that_the_user_set_wins():
    environment = {**STEP, "MASTER_PORT": "1234"}
    settle(environment)
    assert environment["MASTER_PORT"] == "1234"


def test_the_batch_script_itself_is_one_process():
    environment = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert settle(environment) == "one process"
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize("missing", ["SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_a_step_without_usable_variables_is_refused(missing):
    environment = {name: value for name, value in STEP.items() if name != missing}
    with pytest.raises(ConfigError, match=f"without usable SLURM variables.*{missing}"):
        rank_context(environment)
    with pytest.raises(ConfigError, match=f"without usable SLURM variables.*{missing}"):
        settle(environment)


def test_half_a_rank_is_refused():
    with pytest.raises(ConfigError, match="RANK set but not WORLD_SIZE, LOCAL_RANK"):
        settle({"RANK": "0"})


TORCHRUN = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, RankContext(0, 0, 1)),
        (TORCHRUN, RankContext(6, 2, 4)),
        (STEP, RankContext(5, 1, 3)),
        ({**STEP, **TORCHRUN}, RankContext(6, 2, 4)),  # torchrun inside a step, one task a node
        ({**STEP, "RANK": "0", "WORLD_SIZE": "7"}, RankContext(0, 1, 3)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankContext(0, 0, 1)),
    ],
)
def test_place_on_the_node(environment, expected):
    assert rank_context(environment) == expected


def test_what_torch_distributed_knows_of_the_rank_wins():
    assert rank_context(TORCHRUN, rank=1, world_size=8) == RankContext(1, 2, 4)


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_one_of_several_without_a_place_is_refused(missing):
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match="rank 6 of 8 does not know its place"):
        rank_context(environment)
    with pytest.raises(ConfigError, match="rank 1 of 2 does not know its place"):
        rank_context({}, rank=1, world_size=2)


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="RANK.* must be integers: .*'six'"):
        rank_context({**TORCHRUN, "RANK": "six"})


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-009,012],login1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack1-gpu[01-04]-ib", "rack1-gpu01-ib"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_not_a_node_list():
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        first_host("[]")


def test_tasks_on_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(ConfigError, match="no node 3"):
        tasks_on_node("4(x2),3", 3)
    with pytest.raises(ConfigError, match="four"):
        tasks_on_node("four", 0)

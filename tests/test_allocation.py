"""Which GPUs and how much memory a run takes: the profile, the scheduler's job, and what is there must agree."""

from __future__ import annotations

import pytest

from runner import documents
from runner.allocation import Allotment, choose, read_allotment
from runner.errors import Refusal
from runner.server import Gpus, ServerProfile

# As `nvidia-ctk cdi generate` names four GPUs: by index, by UUID, and all.
PRESENT = ("0", "1", "10", "2", "GPU-a", "GPU-b", "GPU-c", "GPU-d", "all")
JOB = {"SLURM_JOB_ID": "17"}


def chosen(
    present: tuple[str, ...] = PRESENT, env: dict[str, str] | None = None, **gpus: object
) -> tuple[str, ...]:
    """Return what is chosen on server a; `env` is that of a job."""
    allotment = read_allotment(JOB | env) if env is not None else None
    return choose(Gpus.model_validate(gpus), allotment, present, "a", "the CDI device nvidia.com/gpu={}")


def refusal(present: tuple[str, ...] = PRESENT, env: dict[str, str] | None = None, **gpus: object) -> str:
    """Return the whole message of the refusal."""
    with pytest.raises(Refusal) as caught:
        chosen(present, env, **gpus)
    return str(caught.value)


def test_a_count_takes_the_first_ones_by_index() -> None:
    """Numbers are counted as numbers, a GPU with two names is one, and `all` is none."""
    assert chosen(count=3) == ("0", "1", "2")
    assert chosen(count=4) == ("0", "1", "2", "10")
    assert chosen(("GPU-a", "GPU-b", "all"), count=2) == ("GPU-a", "GPU-b")


def test_ids_are_taken_as_they_are_named() -> None:
    """By index or by UUID, in the profile's order."""
    assert chosen(ids=("2", "GPU-d")) == ("2", "GPU-d")


def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    """Each of them, with what is there."""
    assert refusal(("0", "1", "2", "all"), ids=("0", "3", "GPU-x")) == (
        "GPU is not there: server a: gpus\n"
        "    expected the CDI device nvidia.com/gpu=3\n"
        "    found    there are 0, 1, 2\n"
        "    fix      name GPUs of this server in server.yaml; `ferry doctor --server` says how they are given to containers\n"
        "GPU is not there: server a: gpus\n"
        "    expected the CDI device nvidia.com/gpu=GPU-x\n"
        "    found    there are 0, 1, 2\n"
        "    fix      name GPUs of this server in server.yaml; `ferry doctor --server` says how they are given to containers"
    )


def test_four_asked_for_and_three_there_is_refused() -> None:
    """By count: what there is, is named."""
    assert refusal(("0", "1", "2", "all"), count=4) == (
        "fewer GPUs than asked for: server a: gpus\n"
        "    expected 4 GPUs\n"
        "    found    there are 3: 0, 1, 2\n"
        "    fix      use a server that has as many, or see `ferry doctor` for those missing"
    )
    assert "there are 0: none" in refusal((), count=1)


def test_a_job_gives_the_gpus_of_the_server_not_places_in_its_own_list() -> None:
    """nvidia-docker 1227: with devices held in a cgroup, CUDA_VISIBLE_DEVICES=0,1 may be the GPUs 2 and 10."""
    held = {"SLURM_JOB_GPUS": "2,10", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert chosen(env=held, count=2) == ("2", "10")
    assert chosen(env={"SLURM_JOB_GPUS": "2,10", "CUDA_VISIBLE_DEVICES": "2,10"}, count=2) == ("2", "10")
    assert chosen(env={"SLURM_JOB_GPUS": "2,10"}, count=1) == ("2",)
    allotment = read_allotment(JOB | held)
    assert allotment is not None
    assert allotment.visible == ("0", "1")


def test_a_step_has_its_own_part_of_the_job() -> None:
    """SLURM_STEP_GPUS is narrower than SLURM_JOB_GPUS, and within it."""
    step = {"SLURM_JOB_GPUS": "0,1,2,10", "SLURM_STEP_GPUS": "2,10", "CUDA_VISIBLE_DEVICES": "2,10"}
    assert chosen(env=step, count=2) == ("2", "10")
    assert "SLURM_STEP_GPUS\n    expected some of SLURM_JOB_GPUS, 0,1" in refusal(
        env={"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "2"}, count=1
    )


def test_names_are_names() -> None:
    """UUIDs and MIG devices in CUDA_VISIBLE_DEVICES say which GPUs, whatever is counted."""
    assert chosen(env={"SLURM_JOB_GPUS": "1", "CUDA_VISIBLE_DEVICES": "GPU-b"}, count=1) == ("GPU-b",)
    assert chosen(("0", "MIG-7"), env={"CUDA_VISIBLE_DEVICES": "MIG-7"}, ids=("MIG-7",)) == ("MIG-7",)
    assert "expected 2 GPUs" in refusal(
        env={"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "GPU-b"}, count=1
    )


def test_words_of_the_scheduler_that_disagree_are_refused() -> None:
    """Neither is believed."""
    assert refusal(env={"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "1,2"}, count=2) == (
        "the scheduler's words disagree: job 17: CUDA_VISIBLE_DEVICES\n"
        "    expected 0,1, or 0,1 where devices are held in a cgroup\n"
        "    found    1,2\n"
        "    fix      start ferry with the variables as the scheduler set them; it never chooses between the two"
    )


def test_places_alone_are_refused_unless_the_job_has_all() -> None:
    """CUDA_VISIBLE_DEVICES=0,1 of four may be any two; 0 to 3 of four are all, and 2,10 can only be ids."""
    assert chosen(env={"CUDA_VISIBLE_DEVICES": "2,10"}, count=2) == ("2", "10")
    assert chosen(("0", "1"), env={"CUDA_VISIBLE_DEVICES": "0,1"}, count=2) == ("0", "1")
    assert "which may count from the job's first GPU" in refusal(env={"CUDA_VISIBLE_DEVICES": "0,1"}, count=2)


def test_a_profile_takes_nothing_that_the_job_does_not_have() -> None:
    """Ids outside of the allotment by name, more than it has by number, and a job without GPUs."""
    mine = {"SLURM_JOB_GPUS": "0,1"}
    assert chosen(env=mine, ids=("1",)) == ("1",)
    assert "expected one of 0, 1, of job 17\n    found    2\n" in refusal(env=mine, ids=("0", "2"))
    assert "expected 4 GPUs\n    found    the job has 2: 0, 1\n" in refusal(env=mine, count=4)
    none = refusal(env={"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, count=4)
    assert none.startswith("no GPU in the job: job 17\n    expected 4 GPUs\n    found    none")


@pytest.mark.parametrize("text", ["0,0", "0,,1", "all", "0;rm", "0-3 ", "0, 1"])
def test_what_is_no_list_is_refused_by_its_variable(text: str) -> None:
    """Nothing of the environment is guessed at; a range is no id that a server has."""
    said = refusal(env={"SLURM_JOB_GPUS": text}, count=1)
    assert "SLURM_JOB_GPUS" in said or "nvidia.com/gpu=0-3" in said


def test_outside_of_a_job_the_environment_says_nothing() -> None:
    """CUDA_VISIBLE_DEVICES of a shell is not an allotment."""
    assert read_allotment({"CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_GPUS": "3"}) is None


@pytest.mark.parametrize(
    ("env", "bound"),
    [
        ({"SLURM_MEM_PER_NODE": "1024"}, 1 << 30),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "8"}, 4 << 30),
        ({"SLURM_MEM_PER_GPU": "2048", "SLURM_JOB_GPUS": "4,5"}, 4 << 30),
        ({}, None),
    ],
)
def test_the_jobs_memory_on_this_node(env: dict[str, str], bound: int | None) -> None:
    """Slurm says it by node, CPU or GPU, in MiB."""
    allotment = read_allotment(JOB | env)
    assert isinstance(allotment, Allotment)
    assert allotment.memory_bytes == bound


def test_memory_that_is_no_number_is_refused() -> None:
    """By the variable's name."""
    with pytest.raises(Refusal) as caught:
        read_allotment(JOB | {"SLURM_MEM_PER_NODE": "1G", "SLURM_MEM_PER_CPU": "²"})
    assert [fault.where for fault in caught.value.faults] == [
        "environment: SLURM_MEM_PER_NODE",
        "environment: SLURM_MEM_PER_CPU",
    ]


@pytest.mark.parametrize("gpus", ["{}", "{count: 2, ids: ['0', '1']}", "{ids: []}", "{ids: [all]}", "{ids: ['0', '0']}",
                                  "{count: 0}", "{count: 1, by: gpus}"])  # fmt: skip
def test_a_profile_asks_once_and_never_for_all(gpus: str) -> None:
    """docker/docs 21026: neither count nor ids is no GPU, both is an error. Here both are refused when the profile is read."""
    raw = f"ferry: 1\nname: a\nassets: {{}}\ngpus: {gpus}\n".encode()
    with pytest.raises(Refusal) as caught:
        documents.parse(ServerProfile, raw, "server.yaml")
    assert "server.yaml: gpus" in str(caught.value)


def test_cdi_is_what_a_profile_asks_for_by_default() -> None:
    """nvidia-container-toolkit 48: GPUs given by the runtime can vanish from a running container."""
    raw = b"ferry: 1\nname: a\nassets: {}\ngpus: {count: 4}\n"
    profile = documents.parse(ServerProfile, raw, "server.yaml")
    assert profile.gpus == Gpus(by="cdi", count=4)

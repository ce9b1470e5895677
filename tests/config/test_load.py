"""Loading a configuration: precedence, refusals, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dora.config.load import dump, load, parse
from dora.config.schema import SUMS, Config, EngineConfig, SourceConfig, TaskConfig
from dora.errors import ConfigError


def refused(*overrides: str, path: Path | None = None) -> list[str]:
    """Load the settings, which must fail; return the lines of the error."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, environ={})
    return str(caught.value).splitlines()


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_apply():
    assert load(None, environ={}) == Config()


def test_a_set_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path):
    path = written(tmp_path, "[rollout]\nmax_staleness = 1\ngroup_size = 4\n")
    config = load(path, ["rollout.max_staleness=3"], environ={})
    assert (config.rollout.max_staleness, config.rollout.group_size) == (3, 4)
    assert config.rollout.groups_per_step == Config().rollout.groups_per_step


def test_a_file_changes_the_keys_it_names_and_leaves_lists_of_the_defaults_to_be_set(tmp_path: Path):
    path = written(tmp_path, "[task]\ngraders = 2\n")
    task = load(path, ["task.sources.0.weight=2"], environ={}).task
    [source] = Config().task.sources
    assert (task.graders, task.rewards) == (2, Config().task.rewards)
    assert task.sources == (source.model_copy(update={"weight": 2}),)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().run.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=plain", "plain"),
        ('run.name="quoted"', "quoted"),
        ("run.name=a=b", None),
        ("trainer.learning_rate=3e-4", 3e-4),
        ("trainer.learning_rate=1", 1.0),
        ("rollout.filter_zero_variance=false", False),
        ("model.path=/models/a b", "/models/a b"),
        ('engine.urls=["http://a:1", "http://b:1", "http://c:1"]', ("http://a:1", "http://b:1", "http://c:1")),
        ('engine.path_map={"/a" = "/b"}', {"/a": "/b"}),
    ],
)
def test_a_set_value_is_toml_or_else_text(override: str, value: object):
    section, _, name = override.partition("=")[0].partition(".")
    if value is None:
        assert refused(override) == [
            f'--set {override}: run.name: got "a=b", expected text that matches ^[A-Za-z0-9_-][A-Za-z0-9_.-]*$'
        ]
        return
    assert getattr(getattr(load(None, [override], environ={}), section), name) == value


def test_a_set_value_cannot_add_a_second_key():
    assert load(None, ["task.system_prompt=1\nrun = 2"], environ={}).task.system_prompt == "1\nrun = 2"


def test_lists_are_reached_by_index_and_the_first_index_past_the_end_appends():
    config = load(
        None, ["eval.sets.0.prompts=64", "eval.sets.1.name=other", "task.sources.0.options.max_terms=9"], environ={}
    )
    assert [(s.name, s.prompts) for s in config.eval.sets] == [("heldout", 64), ("other", 512)]
    assert config.task.sources == (SourceConfig(description=SUMS, options={"max_terms": 9}),)


def test_the_task_is_described_by_its_sources_and_not_by_those_of_the_default_job():
    assert Config().task.description == SUMS
    own = TaskConfig(
        sources=(SourceConfig(kind="jsonl"), SourceConfig(description="A."), SourceConfig(description="A."))
    )
    assert own.description == "A."
    assert TaskConfig(sources=(SourceConfig(kind="jsonl"),)).description == ""


def test_an_index_beyond_the_end_is_refused():
    assert refused("eval.sets.2.prompts=64") == ["--set eval.sets.2.prompts=64: '2' is not an index from 0 to 1"]
    assert refused("eval.sets.x=1") == ["--set eval.sets.x=1: 'x' is not an index from 0 to 1"]


def test_a_set_without_value_or_key_is_refused():
    assert refused("rollout") == ["--set rollout: expected SECTION.NAME=VALUE"]
    assert refused("rollout.=1") == ["--set rollout.=1: expected SECTION.NAME=VALUE"]


def test_a_set_below_a_plain_value_is_refused():
    assert refused("run.seed.a=1") == ["--set run.seed.a=1: run.seed is a value, not a table, and has no key 'a'"]
    assert refused("run.seed.a.b=1") == [
        "--set run.seed.a.b=1: the value that should contain 'a' is not a table or a list"
    ]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("rollout.max_stalenes", "did you mean rollout.max_staleness?"),
        ("rolout", "did you mean rollout?"),
        ("rollout.steps", "did you mean run.steps?"),
        ("max_staleness", "did you mean rollout.max_staleness?"),
        ("task.sources.0.kid", "did you mean task.sources.0.kind?"),
        ("eval.sets.0.source.promt", "did you mean eval.sets.0.source.prompt?"),
        ("trainer.max_stalenes", "did you mean rollout.max_staleness?"),
        ("weights.zzz", "valid here: memory_folder, transfer, keep"),
        (
            "task.sources.0.zzzzzzzz",
            "valid here: kind, name, path, subset, split, revision, prompt, answer, description, options, weight, "
            "label, advantage",
        ),
    ],
)
def test_the_error_for_an_unknown_key_suggests_the_nearest_valid_one(given: str, meant: str):
    assert refused(f"{given}=1") == [f"--set {given}=1: unknown key {given}; {meant}"]


@pytest.mark.parametrize("given", ["trainer.frobs", "trainer.frob", "trainer.frobbing"])
def test_a_dissimilar_key_of_another_section_is_not_suggested(given: str):
    (line,) = refused(f"{given}=grpo")
    assert line.startswith(
        f"--set {given}=grpo: unknown key {given}; valid here: ranks, min_ranks, parallel, command, address, "
    )
    assert "token" not in line.partition("valid here")[2].split(", ")


def test_a_problem_names_the_file_that_it_came_from(tmp_path: Path):
    path = written(tmp_path, "[rollout]\nmax_stalenes = 1\n")
    assert refused(path=path) == [f"{path}: unknown key rollout.max_stalenes; did you mean rollout.max_staleness?"]


def test_every_problem_has_a_line_of_its_own_and_its_own_origin(tmp_path: Path):
    path = written(tmp_path, "[trainer]\nranks = 'two'\n[rollout]\nfilter_zero_variance = 'no'\n")
    assert refused("trainer.learning_rate=-1", "rollout.strategy=dorra", path=path) == [
        "--set rollout.strategy=dorra: rollout.strategy: "
        "got \"dorra\", expected 'dora', 'sync', 'periodic', 'one_step_off', 'partial', 'partial_bounded', "
        "'partial_sync' or 'oversample'; did you mean \"dora\"?",
        f'{path}: rollout.filter_zero_variance: got "no", expected true or false',
        f'{path}: trainer.ranks: got "two", expected an integer',
        "--set trainer.learning_rate=-1: trainer.learning_rate: got -1, expected more than 0",
    ]


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("run.seed=true", "got true, expected an integer"),
        ('run.seed="1"', 'got "1", expected an integer'),
        ("run.seed=1.5", "got 1.5, expected an integer"),
        ("run.steps=-1", "got -1, expected at least 0"),
        ("trainer.betas.0=1.5", "got 1.5, expected less than 1"),
        ("trainer.learning_rate=nan", "got NaN, expected a finite number"),
        ("trainer.lora.alpha=1e-320", "got 1e-320, expected at least 1e-09"),  # values of B would be too large to draw
        ("model.path=7", "got 7, expected text"),
        ("engine.urls=http://a", 'got "http://a", expected a list'),
        ("engine.path_map=3", "got 3, expected a table"),
        ("run=3", "got 3, expected a table"),
        ("nodes.train=-1", "got -1, expected a number of nodes or 'auto'"),
        ("nodes.train=all", "got \"all\", expected a number of nodes or 'auto'"),
        ("trainer.betas=[0.9, 0.95, 0.99]", "got [0.9, 0.95, 0.99], expected at most 2 items"),
        ("run.seed=9223372036854775808", "an integer has at most 64 bits"),
        ("task.sources.0.options.max_terms=-9223372036854775809", "an integer has at most 64 bits"),
    ],
)
def test_a_wrong_type_names_the_given_value_and_the_expected_type(override: str, wanted: str):
    assert refused(override) == [f"--set {override}: {override.partition('=')[0]}: {wanted}"]


def test_an_item_that_is_missing_is_named():
    override = "--set trainer.betas=[0.9]"
    assert refused("trainer.betas=[0.9]") == [f"{override}: trainer.betas.1: is missing"]


def test_a_name_with_dots_is_no_path_of_tables():
    """Python's dicts and quoted keys of TOML may have one."""
    with pytest.raises(ConfigError) as caught:
        load({"run.steps": 3}, environ={})
    says = 'unknown key "run.steps": a name has no dots; nest the tables, as in run = { steps = ... }'
    assert str(caught.value) == says


@pytest.mark.parametrize("key", ["run.folder", "weights.memory_folder", "nodes.checkpoints", "nodes.tls"])
def test_a_home_folder_that_no_shell_has_expanded_is_refused(key: str):
    assert refused(f"{key}=~/runs") == [f"{key}: ~/runs would be below a folder named ~ here; write the path in full"]


def test_the_id_of_a_run_does_not_begin_with_a_dot():
    (line,) = refused("run.name=.hidden")
    assert line.startswith('--set run.name=.hidden: run.name: got ".hidden", expected text that matches ')


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("engine.kind=SGLang", "got \"SGLang\", expected 'embedded' or 'sglang'; did you mean \"sglang\"?"),
        ("task.rewards.0.kind=mth", "'function' or 'judge'; did you mean \"math\"?"),
        ("objective.loss.kind=gsop", ", 'FILE.py:function'; did you mean \"gspo\"?"),
        ("engine.kind=vllm", "got \"vllm\", expected 'embedded' or 'sglang'"),
        ("rollout.strategy=7", "'partial_sync' or 'oversample'"),
    ],
)
def test_a_misspelt_value_suggests_the_choice_that_is_similar(override: str, meant: str):
    [line] = refused(override)
    assert line.endswith(meant)


def test_a_file_that_is_missing_unreadable_or_not_text_is_named(tmp_path: Path):
    missing = tmp_path / "none.toml"
    assert refused(path=missing) == [f"{missing}: no such file"]
    assert refused(path=tmp_path) == [
        f"{tmp_path}: is a folder, not a TOML file; dora run --resume continues the run in one"
    ]
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"a = '\xff'")
    assert refused(path=binary) == [f"{binary}: not UTF-8 text (byte 5)"]


def test_a_syntax_error_names_file_line_and_column(tmp_path: Path):
    path = written(tmp_path, "[run]\nseed = = 1\n")
    assert refused(path=path) == [f"{path}:2:8: Invalid value"]


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (["rollout.group_size=1"], "rollout.group_size: 1 answer per prompt has no siblings"),
        (
            ["rollout.max_staleness=4"],
            "rollout.max_staleness: K = 4 keeps up to 5 versions alive, but there are 4 instances",
        ),
        (["task.max_prompt_tokens=99999"], "engine.kv_tokens: 16384 cannot hold"),
        (
            ['engine.urls=["http://a"]', "engine.instances=1"],
            "rollout.max_staleness: K = 2 keeps up to 3 versions alive, but there are 2 instances",
        ),
        (
            ["environment.name=dora.environments.agent:Agent"],
            "environment.episode_timeout_s: agents that drive themselves need one",
        ),
        (["run.no_progress_s=100"], "rollout.watchdog_s: 3 x 120 s must be below run.no_progress_s (100 s)"),
        (['engine.urls=["http://a", "http://b", "http://a"]'], "engine.urls: http://a is listed twice"),
        (
            ['engine.urls=["10.0.0.5:30000"]', "rollout.strategy=sync"],
            "engine.urls: 10.0.0.5:30000 is not a server address",
        ),
        (["trainer.address=0.0.0.0:5000"], "trainer.address: cannot listen on 0.0.0.0:5000; write it as tcp://"),
        (["trainer.address=tcp://0.0.0.0:65536"], "trainer.address: cannot listen on tcp://0.0.0.0:65536; write it as"),
        (
            ["engine.instances=0", "rollout.strategy=sync"],
            "engine.instances: 0 leaves the run without a server; raise it or give engine.urls",
        ),
        (
            ['engine.command=["serve", "{modle}"]'],
            "engine.command: unknown placeholder {modle}; known are {model}, {host}, {port}, ",
        ),
        (
            ["engine.kind=sglang", "engine.gpus=[0, 1]"],
            "engine.gpus: 2 listed, but 4 instances of engine.tensor_parallel = 1 need 4",
        ),
        (["engine.tensor_parallel=2"], "engine.tensor_parallel: the embedded engine uses one GPU"),
        (
            ["engine.kind=sglang", "engine.min_step_ms=10"],
            "engine.min_step_ms: only the embedded engine has it; set it to 0, or engine.kind to embedded",
        ),
        (['engine.command=["serve"]', "engine.min_step_ms=10"], "engine.min_step_ms: only the embedded engine has it"),
        (
            ["objective.router_replay=r3", "engine.draft_tokens=4"],
            "engine.draft_tokens: an engine that returns the choice of experts does not draft; set it to 0, or",
        ),
        (["engine.kind=sglang", "engine.draft_tokens=4"], "engine.draft_tokens: only the embedded engine has it"),
        (["trainer.optimizer=muon", "trainer.optimizer_state=8bit"], "trainer.optimizer_state: 8bit is for adamw"),
        (
            ["trainer.optimizer_state=8bit", "trainer.betas=[0.9, 0.81]"],
            "trainer.optimizer_state: 8bit needs beta1² < beta2, which bounds the steps (0.9, 0.81)",
        ),
        (
            ["trainer.min_learning_rate=0.1"],
            "trainer.min_learning_rate: has no effect with trainer.schedule = constant",
        ),
        (["trainer.compile=true"], "trainer.compile: auto checkpointing may keep tensors that compiled layers write"),
        (
            [
                "trainer.compile=true",
                "trainer.ranks=2",
                "trainer.parallel.tensor=2",
                "trainer.activation_checkpointing=none",
            ],
            "trainer.compile: not with trainer.parallel.tensor, where layers gather weights",
        ),
        (
            ["task.sources.0.kind=jsonl", "eval.sets=[]"],
            "task.rewards: nothing scores the answers to task.sources.0; add a term, such as [[task.rewards]] with",
        ),
        (
            ["task.sources.0.kind=jsonl", "task.rewards.0.kind=exact"],
            "eval.sets.0: evaluates the built-in arithmetic, which is not the task",
        ),
        (["eval.sets.1.samples=2"], "eval.sets: two sets are named 'heldout'"),
        (
            ["eval.sets.0.source={kind='jsonl', path='rows.jsonl', split='test'}"],
            "eval.sets.0.source.split: is for kinds 'datasets' and 'verifiers', not for 'jsonl'; remove it",
        ),
        (
            ["task.rewards.1.sources=['easy']", "task.sources.0.label=simple"],
            "task.rewards.1.sources: no source is labelled 'easy'; labels are simple",
        ),
        (["task.rewards.1.sources=['easy']"], "task.rewards.1.sources: no source is labelled 'easy'; no source has a"),
        (
            ["task.sources.0.label=a", "task.sources.1.weight=2", "task.rewards.0.sources=['a']", "eval.sets=[]"],
            "task.sources.1: it has no label, and no term of task.rewards scores its answers",
        ),
        (
            ["task.sources.0.label=a", "task.rewards.0.sources=['a']", "eval.sets.0.source.label=b"],
            "eval.sets.0.source: it has the label 'b', and no term of task.rewards scores its answers",
        ),
        (
            ["task.sources.0.label=a", "eval.sets.0.rewards.0.sources=['a']", "eval.sets.0.rewards.1.kind=exact"],
            "eval.sets.0.rewards.0.sources: no source is labelled 'a'; no source has a label",
        ),
        (
            ["task.rewards.1.kind=overlong"],
            "task.rewards.1.buffer: 0 tokens; overlong needs 1 to 160 (rollout.max_new_tokens)",
        ),
        (["trainer.lora.alpha=16"], "trainer.lora.alpha: has no effect with trainer.lora.rank = 0"),
        (
            ["model.adapter=folder"],
            "model.adapter: only a run that trains an adapter begins with one; set trainer.lora",
        ),
        (["trainer.lora.rank=8", "trainer.lora.targets=[]"], "trainer.lora.targets: write out the names"),
        (["trainer.lora.rank=8", "trainer.lora.targets=['all-linear']"], "trainer.lora.targets: write out the names"),
        (["trainer.lora.rank=8", "trainer.optimizer=muon"], "trainer.optimizer: muon would orthogonalize"),
        (
            ["trainer.lora.rank=8", "trainer.optimizer_state=8bit", "trainer.betas=[0.9, 0.95]"],
            "trainer.optimizer_state: with trainer.lora, only an adapter has moments",
        ),
        (["trainer.lora.rank=8", "trainer.parallel.tensor=2"], "trainer.parallel.tensor: not with trainer.lora"),
        (["engine.adapters=true"], "engine.adapters: versions are adapters only if one is trained; set trainer.lora"),
        (
            ["engine.adapters=true", "trainer.lora.rank=8", "rollout.strategy=partial_bounded"],
            "engine.adapters: partial_bounded changes the weights under running requests",
        ),
        (
            ["engine.adapters=true", "trainer.lora.rank=8", "weights.transfer=distributed"],
            "weights.transfer: servers read adapters from folders",
        ),
        (["trainer.lora.dropout=0.1"], "--set trainer.lora.dropout=0.1: trainer.lora.dropout: not supported, because"),
    ],
)
def test_a_contradiction_between_sections_is_found_before_anything_starts(overrides: list[str], beginning: str):
    (line,) = refused(*overrides)
    assert line.startswith(beginning)


def test_one_server_is_enough_for_any_k_if_it_holds_versions_as_adapters():
    few = ["engine.instances=1", "rollout.max_staleness=4"]
    assert refused(*few)
    adapters = ["engine.adapters=true", "trainer.lora.rank=8"]
    assert load(None, [*few, *adapters], environ={}).num_instances == 1


def test_without_terms_of_the_reward_an_environment_is_graded_by_no_one_else(tmp_path: Path):
    environment = ["environment.name=a:b"]
    assert load(None, environ={}).task.rewards == Config().task.rewards != ()
    config = load(None, environment, environ={})
    assert config.task.rewards == ()
    assert load(written(tmp_path, dump(config)), environ={}) == config, "a resume goes on without"
    (term,) = load(None, [*environment, "task.rewards=[{kind='math'}]"], environ={}).task.rewards
    assert term.kind == "math"


def test_all_contradictions_are_reported_at_once():
    assert len(refused("rollout.group_size=1", "rollout.max_staleness=9", "run.no_progress_s=1")) == 3


def test_strategies_that_fix_the_staleness_need_no_more_instances():
    assert load(None, ["rollout.strategy=sync", "engine.instances=1"], environ={}).max_staleness == 0


def test_secrets_come_from_the_environment():
    config = load(None, environ={"DORA_ENGINE_API_KEY": "k", "DORA_TOKEN": "t"})
    assert (config.engine.api_key, config.trainer.token) == ("k", "t")


def test_space_around_a_secret_is_no_part_of_it(tmp_path: Path):
    """Many tools end a secret with a line break."""
    file = tmp_path / "token"
    file.write_text("b\n")
    config = load(None, environ={"DORA_ENGINE_API_KEY": " a\n", "DORA_TOKEN": "\n", "DORA_TOKEN_FILE": str(file)})
    assert (config.engine.api_key, config.trainer.token) == ("a", "b")


@pytest.mark.parametrize("text", ["a\nb", "a\x00b", "a\x1bb"])
def test_a_secret_that_is_no_line_of_text_is_refused_and_not_shown(text: str, tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(text)
    says = "a secret is one line, without control characters"
    for environ, source in (
        ({"DORA_STATUS_TOKEN": text}, "DORA_STATUS_TOKEN"),
        ({"DORA_STATUS_TOKEN_FILE": str(file)}, f"DORA_STATUS_TOKEN_FILE: {file}"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(None, environ=environ)
        assert str(caught.value) == f"{source}: {says}"


def test_a_key_that_no_server_would_recognize_is_refused_and_not_shown():
    with pytest.raises(ConfigError) as caught:
        load(None, environ={"DORA_ENGINE_API_KEY": "schlüssel"})
    says = "engine.api_key: servers compare keys of ASCII characters only; set another DORA_ENGINE_API_KEY"
    assert str(caught.value) == says


def test_secrets_in_a_file_or_a_command_line_are_refused(tmp_path: Path):
    wanted = ["engine.api_key: is a secret; set it only in the environment variable DORA_ENGINE_API_KEY"]
    assert refused("engine.api_key=k") == wanted
    assert refused(path=written(tmp_path, "[engine]\napi_key = 'k'\n")) == wanted


def test_secrets_are_neither_dumped_nor_shown():
    config = load(None, environ={"DORA_ENGINE_API_KEY": "sesame", "DORA_TOKEN": "sesame"})
    assert "sesame" not in dump(config)
    assert "sesame" not in repr(config)


def test_a_section_of_the_wrong_shape_is_named_even_with_secrets_around():
    with pytest.raises(ConfigError, match="engine: got 3, expected a table"):
        load(None, ["engine=3"], environ={"DORA_ENGINE_API_KEY": "k"})


def test_an_infinite_option_of_a_source_is_dumped(tmp_path: Path):
    config = load(None, ['task.sources=[{kind="arithmetic", options={max_terms=inf}}]'], environ={})
    assert load(written(tmp_path, dump(config)), environ={}) == config


def test_a_dump_loads_into_the_same_config(tmp_path: Path):
    config = load(
        None,
        [
            'task.system_prompt="line\\n\\"quoted\\" \\u007f ü 🙂"',
            'task.sources=[{kind = "jsonl", path = "a.jsonl", options = {list = [1, {deep = true}]}}, '
            '{kind = "arithmetic", weight = 0.5}]',
            'engine.path_map={"/host a" = "/there"}',
            "trainer.learning_rate=1e-7",
            "model.thinking=false",
            "eval.sets.0.rewards=[{kind='exact'}]",
            "task.rewards=[{kind='exact'}]",
        ],
        environ={},
    )
    assert load(written(tmp_path, dump(config)), environ={}) == config
    assert load(written(tmp_path, dump(Config())), environ={}) == Config()


@given(
    prompt=st.text(),
    mapped=st.dictionaries(st.text(min_size=1), st.text(), max_size=3),
    urls=st.lists(st.text(), max_size=3),
    options=st.dictionaries(
        st.text(),
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.lists(st.booleans()),
        max_size=3,
    ),
)
def test_a_dump_is_parsed_into_the_same_config_and_dumped_as_the_same_text(prompt, mapped, urls, options):
    task = TaskConfig(system_prompt=prompt, sources=(SourceConfig(options=options), SourceConfig(kind="jsonl")))
    engine = EngineConfig(path_map=mapped, args=tuple(urls))
    config = Config.model_construct(**{**dict(Config()), "task": task, "engine": engine})
    text = dump(config)
    assert parse(text) == config
    assert dump(parse(text)) == text


def test_a_dump_has_a_line_for_each_key_and_a_table_for_each_section():
    lines = dump(Config()).splitlines()
    for line in ("[run]", "[engine.path_map]", "[[task.sources]]", "[[eval.sets]]", "steps = 64", 'device = "cpu"'):
        assert line in lines
    assert max(map(len, lines)) <= 100


def test_copies_on_the_host_are_refused_where_the_device_is_the_host():
    assert refused("trainer.copies=host") == [
        "trainer.copies: with trainer.device = cpu, the copies are on the host anyway; use device"
    ]
    assert load(None, ["trainer.copies=host", "trainer.device=cuda"], environ={}).trainer.copies == "host"


def test_a_preset_that_the_file_would_hide_is_refused(tmp_path: Path):
    path = written(tmp_path, dump(Config()))  # spells everything out, as the configuration of a run does
    assert refused("objective.preset=gspo", path=path) == [
        f"--set objective.preset=gspo: {path} gives objective.advantage, objective.aggregation, objective.loss.kind, "
        "objective.loss.ratio, objective.loss.clip_low, objective.loss.clip_high, which would take precedence over "
        "those of the preset; remove them there, or set them too"
    ]
    keys = [
        "objective.advantage=grpo",
        "objective.aggregation=seq_mean_token_mean",
        'objective.loss={kind="gspo", ratio="bypass"}',
    ]
    config = load(path, ["objective.preset=gspo", *keys, "objective.weight=none"], environ={})
    assert config.objective == load(None, ["objective.preset=gspo"], environ={}).objective
    assert load(path, ["objective.preset=dr_grpo"], environ={}).objective.preset == "dr_grpo"


def test_a_preset_that_tables_would_hide_is_refused_without_a_file_to_name():
    with pytest.raises(ConfigError, match=r"^--set objective\.preset=dapo: the configuration gives objective\.loss"):
        load({"objective": {"loss": {"kind": "cispo"}}}, ["objective.preset=dapo"], environ={})


def test_a_preset_of_the_file_may_be_set_again(tmp_path: Path):
    path = written(tmp_path, '[objective]\npreset = "gspo"\nadvantage = "rloo"\n')
    assert load(path, ["objective.preset=gspo"], environ={}).objective.advantage == "rloo"


def test_another_kind_of_loss_does_not_inherit_the_options_of_the_one_in_the_file(tmp_path: Path):
    path = written(tmp_path, dump(load(None, ["objective.preset=gspo"], environ={})))
    sets = ["objective.loss.kind=ppo", "objective.loss.ratio=bypass", "objective.aggregation=token_mean"]
    assert load(path, sets, environ={}).objective.loss == load(None, sets, environ={}).objective.loss
    assert load(path, ["objective.loss.kind=gspo"], environ={}).objective == load(path, environ={}).objective


@pytest.mark.parametrize("index", [0, 1])
def test_moments_that_would_never_decay_are_refused(index: int):
    key = f"trainer.betas.{index}"
    assert refused(f"{key}=1") == [f"--set {key}=1: {key}: got 1, expected less than 1"]

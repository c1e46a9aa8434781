"""The config: accepted values, refused values, and the error messages."""

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from segapp.config import (
    RunConfig,
    config_schema,
    dump_config,
    find_config,
    load_config,
    named_config,
    resume_differences,
    validate_config,
)
from segapp.config.load import config_of, parse_overrides
from segapp.config.words import KEYS_ELSEWHERE, VALUES_ELSEWHERE, known_keys, meant_word, words_of
from segapp.config.yaml_reader import parse_yaml
from segapp.errors import ConfigError
from tests.support.reference import config_reference

MINIMAL = {"name": "x", "data": {"format": "camvid", "root": "data/camvid"}}
NAN = float("nan")
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return str(caught.value)


def test_all_problems_are_reported_with_place_and_nearest_key(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "name: demo\n"
        "data: {format: citscapes, root: data/demo, cropp_px: [3, 4]}\n"
        "optim: {lr: abc, momentm: 3}\n"
        "train:\n"
        "  epochs: 1.5\n"
        "epochs: 3\n",
        "train.batch_sise=3",
        "model.library=smq",
    )
    lines = message.splitlines()
    assert lines[0].startswith("8 problems")
    for part in (
        "c.yaml:2: data.format = 'citscapes': did you mean cityscapes? accepted: cityscapes | camvid",
        "c.yaml:2: unknown key data.cropp_px: did you mean data.crop_px?",
        "c.yaml:3: optim.lr = 'abc': a number is expected",
        "c.yaml:3: unknown key optim.momentm: did you mean optim.momentum?",
        "c.yaml:5: train.epochs = 1.5: a whole number is expected",
        "c.yaml:6: unknown key epochs: did you mean train.epochs?",
        "command line: unknown key train.batch_sise: did you mean train.batch_size?",
        "command line: model.library = 'smq': did you mean smp? accepted: torchvision | smp | segapp",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.crop_px=[64, a]", "data.crop_px.1 = 'a': a whole number is expected"),
        ("data.scale=[1, 2, 3]", "data.scale = [1, 2, 3]: tuple should have at most 2 items"),
        ("loss.plus=[{nam: ce}]", "unknown key loss.plus.0.nam: did you mean loss.plus.0.name?"),
        (
            "schedule.warmup_steps=150%",
            "'150%': accepted: a whole number >= 0 | a share such as 5%",
        ),
        ("distill={teacher: t, temprature: 3}", "unknown key distill.temprature: did you mean distill.temperature?"),
        ("distill={teacher: t, temperature: 0}", "distill.temperature = 0: input should be greater than 0"),
        ("distill={temperature: 1}", "distill.teacher is missing: Teacher with the same classes"),
        ("distill={teacher: t, critic: {width: 3}}", "unknown key distill.critic: did you mean distill."),
        ("distill=3", "distill = 3: "),
        ("name=3", "config: name = 3: text is expected: write it in quotes"),
        ("xyz=3", "unknown key xyz: the sections are name, "),
        ("loss.plus=3", "loss.plus = 3: a list is expected"),
        ("parallel.gpu0_bsz=x", "config: parallel.gpu0_bsz = 'x': accepted: a whole number >= 0 | auto | null"),
        ("data.photometric=-1", "config: data.photometric = -1: accepted: true | false | a number >= 0"),
        ("optim.clip_grad_norm=x", "config: optim.clip_grad_norm = 'x': a number is expected"),
        ("loss.options.implementation=x", "loss.options.implementation = 'x': accepted: auto | reference"),
        ("loss.plus=[{name: dice, options: {smoth: 1}}]", "key loss.plus.0.options.smoth: no option of dice"),
        ("loss={name: lovasz, options: {gamma: 1}}", "key loss.options.gamma: no option of lovasz: it"),
        ("loss={name: focal, options: {gamma: x}}", "loss.options.gamma = 'x': a number is expected"),
        (
            "optim={name: adam, options: {betas: [2, 1], nestrov: 1}}",
            "optim.options.betas.0 = 2: input should be less than 1\n"
            "  config: optim.options.betas.1 = 1: input should be less than 1\n"
            "  config: unknown key optim.options.nestrov: no option of adam: use betas",
        ),
        ("optim.groups=[{}]", "optim.groups.0.pattern is missing: backbone, or a pattern of parameter or module names"),
        ("loss.class_weights=[-1]", "loss.class_weights = [-1]: "),
        (f"schedule={'x' * 58}", f"schedule = '{'x' * 58}': a mapping of keys is expected"),
        (f"schedule={'x' * 59}", f"schedule = '{'x' * 56}...: a mapping of keys is expected"),
    ],
)
def test_problem_names_its_key_and_the_nearest(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({**MINIMAL, "data": {**MINIMAL["data"]}}, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("loss.plus=[{name: ce}, {name:dice,weight:0.5}]", [{"name": "ce"}, {"name": "dice", "weight": 0.5}]),
        ("data.label_map={0:255,1: 0,2:1}", {0: 255, 1: 0, 2: 1}),
        ("data.augment=[{Blur:{p:0.5}}, {HorizontalFlip}]", [{"Blur": {"p": 0.5}}, {"HorizontalFlip": None}]),
        ("distill={'teacher:runs/a:b'}", {"teacher": "runs/a:b"}),
        ("loss.plus='[{name:dice},{name: ce}]'", [{"name": "dice"}, {"name": "ce"}]),
        ("data.label_map='{0:255,1:0}'", {0: 255, 1: 0}),
        ("loss.plus=name:dice", [{"name": "dice"}]),
        ("data.crop_px=512x384", [512, 384]),
        ("model.freeze=stem,backbone", ["stem", "backbone"]),
    ],
)
def test_value_without_a_space_or_brackets_is_written_out(override: str, meant: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({**MINIMAL, "data": {**MINIMAL["data"]}}, [override])
    told, key = str(caught.value).partition(": write ")[2], override.partition("=")[0]
    word = shlex.split(told)[0] if told.startswith("'") else f"{key}={told}"
    assert parse_overrides([word]) == {tuple(key.split(".")): meant}


def test_line_without_a_space_is_written_out(tmp_path: Path) -> None:
    said = refusal(tmp_path, "name: x\nloss:\n  plus: [{name:dice}, {name: 'a:b'}, {\"name:ce\"}]\n")
    told = "plus: [{name: dice}, {name: 'a:b'}, {name: ce}]"
    assert said.endswith(f"c.yaml:3: not valid YAML: name:dice lacks a space after its colon: write {told}")
    assert parse_yaml("augment: [{./parts.py:darken}, {'': }, {a.b:c}]")[0]["augment"][0] == {"./parts.py:darken": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 1\r\nname: a\r\ndata: {root: Straße}\r\n".encode("latin-1"), "line 3 is not in UTF-8 (byte 0xdf)"),
        ("seed: 1\rname: Straße\r".encode("cp1252"), "line 2 is not in UTF-8 (byte 0xdf)"),
        ("name: a\nseed: 1\n".encode("utf-16"), "line 1 is in UTF-16"),
        ("道: 路\n".encode("utf-16-be"), "line 1 is not in UTF-8"),
        (b"seed: 1\nname: a\0b\n", "line 2 has a NUL byte"),
    ],
)
def test_config_in_another_encoding_is_refused_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    assert str(caught.value).startswith(f"config {tmp_path / 'c.yaml'} cannot be read: {message}")
    assert str(caught.value).endswith(": save the file as UTF-8")


def test_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes("\ufeffname: first\r\ndata: {format: voc, root: Straße}\r\n".encode())
    config = load_config(tmp_path / "c.yaml")
    assert (config.name, config.data.root) == ("first", "Straße")


def test_home_is_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/eve")
    monkeypatch.setenv("DATA", "/data")
    data = {key: f"~/{key}/$DATA" for key in ("root", "image_dir", "mask_dir", "list_dir", "valid_area")}
    model = {"weights": "~/w.pt", "weights_backbone": "~/b.pt"}
    raw = {
        "name": "a",
        "data": {"format": "list", "classes": ["a", "b"], **data},
        "model": model,
        "distill": {"teacher": "~/t"},
    }
    config = config_of(raw, ["data.root=~/other", "data.val_split=~"])
    assert config.data.root == "/home/eve/other"
    assert config.data.val_split is None  # the null of YAML
    for key in ("image_dir", "mask_dir", "list_dir", "valid_area"):
        assert getattr(config.data, key) == f"/home/eve/{key}/$DATA"
    assert (config.model.weights, config.model.weights_backbone) == ("/home/eve/w.pt", "/home/eve/b.pt")
    assert config.distill is not None
    assert config.distill.teacher == "/home/eve/t"


def test_no_error_shows_a_regular_expression(tmp_path: Path) -> None:
    for name in ("a/b", "_a", "ä", "a" * 101):
        message = refusal(tmp_path, f"name: {name}\ndata: {{format: 'x y', root: a}}\nloss: {{name: 'a b'}}\n")
        assert "name = " in message
        assert "letters, digits, dots, hyphens and underscores are accepted, at most 100" in message
        assert not set("^$[]{}\\") & set(message.replace(str(tmp_path), ""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "name is missing"),
        ("seed: 1\n\nname: \x01\n", "c.yaml:3: not valid YAML: unacceptable character #x0001"),
        ("seed: 1\ndata:\n  root: a\n\tformat: voc\n", "c.yaml:4: not valid YAML: "),
        ("- a\n", "must be a mapping"),
        ("name: x\nname: y\n", "c.yaml:2: not valid YAML: key name is defined twice"),
        ("name: &a x\ndata: *a\n", "aliases"),
        ("name: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("name: !!binary aGk=\n", "c.yaml:1: not valid YAML: YAML tags"),
        ("name: x\n<<: {seed: 3}\n", "c.yaml:2: not valid YAML: merge keys"),
        ("name: x\n--- \nname: y\n", "another document"),
        ("? [a, b]\n: c\n", "c.yaml:1: not valid YAML"),
        ("name: x\ndata: {format: voc, root: d}\noptim: {lr: .inf}\n", "optim.lr = inf"),
        ("name: x\ndata: {format: voc, root: d}\ntrain: {batch_size: true}\n", "not true or false"),
    ],
)
def test_bad_config_is_one_clear_error(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("key", "accepted", "refused"),
    [
        ("schedule.warmup_steps", [0, "5%", "0.5%", "100%"], [-1, "-5%", "100.5%", "5 %", "share"]),
        ("train.batch_size", [1, 65536], [0, 65537]),
        ("data.workers", [0, 512], [-1, 513]),
        ("data.hflip", [0, 1], [-0.01, 1.01, NAN]),
        ("optim.lr", [1e-9], [0, NAN]),
        ("schedule.min_lr", [0], [-1e-9, NAN]),
        ("data.crop_px", [[64, 1]], [[64, 0]]),
    ],
)
def test_numbers_are_accepted_up_to_their_bounds(key: str, accepted: list[object], refused: list[object]) -> None:
    section, name = key.split(".")
    schema = jsonschema.Draft202012Validator(config_schema())

    def raw(value: object) -> dict[str, Any]:
        return {**MINIMAL, section: {**MINIMAL.get(section, {}), name: value}}

    for value in accepted:
        validate_config(raw(value))
        assert schema.is_valid(raw(value))
    for value in refused:
        with pytest.raises(ConfigError, match=re.escape(key)):
            validate_config(raw(value))
        assert value is NAN or not schema.is_valid(raw(value))  # JSON has no such number


def test_yaml_numbers_and_words_keep_their_types() -> None:
    value, lines = parse_yaml("a: 1e-3\nb: no\nc: 010\nd: [1, .5]\ne: 2024-01-01\nf: true\n")
    assert value == {"a": 0.001, "b": "no", "c": 10, "d": [1, 0.5], "e": "2024-01-01", "f": True}
    assert lines["d", "1"] == 4


def test_overrides_take_precedence_and_are_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\ndata: {format: voc, root: d}\ntrain: {epochs: 3}\n")
    config = load_config(
        path,
        ["train.epochs=5", "train.epochs=7", "optim.lr=1e-3", "data.crop_px=[64, 96]", "optim.clip_grad_norm=null"],
    )
    assert (config.train.epochs, config.optim.lr, config.data.crop_px) == (7, 0.001, (64, 96))
    assert config.optim.clip_grad_norm is None


def test_yaml_is_read_up_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_yaml("[" * 32 + "]" * 32)
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        parse_yaml("[" * 33 + "]" * 33)
    monkeypatch.setattr("segapp.config.yaml_reader.MAX_NODES", 5)
    parse_yaml("a: [1, 2]")  # the mapping, its key, the list and its values
    with pytest.raises(ConfigError, match="more than 5 values"):
        parse_yaml("a: [1, 2, 3]")


@pytest.mark.parametrize("word", ["", "epochs", "=3", "a..b=1", "train.epochs"])
def test_override_without_key_and_value_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="is not KEY=VALUE"):
        parse_overrides([word])


def test_printed_config_is_read_back_equal(tmp_path: Path) -> None:
    config = validate_config(MINIMAL | {"loss": {"name": "ce", "plus": [{"name": "dice", "weight": 0.5}]}})
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_config_is_searched_as_given_in_configs_then_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'demoo\.yaml' not found .*: did you mean demo\.yaml\?"):
        find_config("demoo.yaml")
    with pytest.raises(ConfigError, match=r"'xyz' not found .*: known configs: .*demo\.yaml"):
        find_config("xyz")
    for nothing in ("", ".", "/"):
        with pytest.raises(ConfigError, match=re.escape(f"config {nothing!r}")):
            find_config(nothing)
    packaged = find_config("demo.yaml")
    assert packaged.is_absolute()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("")
    assert find_config("demo") == Path("configs/demo.yaml")
    (tmp_path / "mine").mkdir()
    for name in ("demo.yaml", "base.yaml", "mine/broads.yml", "mine/roads.yml"):
        (tmp_path / name).write_text("")
    assert find_config("demo.yaml") == Path("demo.yaml")
    for asked, offered in (
        ("bsae.yaml", "base.yaml"),
        ("bsae", "base.yaml"),
        ("mine/road.yaml", "mine/roads.yml or mine/broads.yml"),
    ):
        with pytest.raises(ConfigError, match=rf"config '{asked}' not found .*: did you mean {offered}\?"):
            find_config(asked)


@pytest.mark.parametrize("word", ["base.yaml", "demo", "nosuch.yml"])
def test_config_without_its_option_is_named(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("")
    with pytest.raises(ConfigError, match=f"--config is missing before {word}: write --config {word}") as raised:
        named_config(None, ["train.epochs=2", word, "later.yaml"])
    assert raised.value.path == word
    with pytest.raises(ConfigError, match=f"'{word}' is a config: write --config {word}"):
        parse_overrides([word])


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.device", "parallel.devices"),
        ("gpus", "parallel.devices"),
        ("batch", "train.batch_size"),
        ("train.learning_rate", "optim.lr"),
        ("model.num_classes", "data.classes"),
        ("optim.epochs", "train.epochs"),
        ("optimizer", "optim or optim.name"),
        ("loss.names", "loss.name or data.classes"),
        ("data.num_wokers", "data.workers"),
    ],
)
def test_key_is_found_in_all_sections_and_by_other_names(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({**MINIMAL, "data": {**MINIMAL["data"]}}, [f"{key}=1"])
    assert str(caught.value) == f"config: unknown key {key}: did you mean {meant}?"


def test_names_of_other_programs_stand_for_keys_that_exist() -> None:
    keys = {".".join(key) for key in known_keys()}
    assert set(KEYS_ELSEWHERE.values()) <= keys
    assert not {key for key in keys if "." not in key} & set(KEYS_ELSEWHERE)
    for key, words in VALUES_ELSEWHERE.items():
        for elsewhere, word in words.items():
            assert word in words_of(key.split("."))
            assert meant_word(key, elsewhere.upper(), words_of(key.split("."))) == f"did you mean {word}?"


MANY = """\
name: base
data:
  format: folder
  root: d
  classes: [a, b, c, d]
  label_map: {0: 0, 5: 3}
  palette: [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]]
model:
  name: deeplabv3_resnet50
"""


def test_problem_that_an_override_causes_is_the_command_lines(tmp_path: Path) -> None:
    assert refusal(tmp_path, MANY, "model.library=smp", "model.name=UNet") == (
        "command line: model.encoder: is missing: the models of model.library = smp are built on an encoder: add e.g. "
        "model.encoder=resnet34, efficientnet-b3 or tu-convnext_tiny (segapp models lists all)"
    )
    assert refusal(tmp_path, MANY + "  library: smp\n", "seed=1").startswith(f"{tmp_path}/c.yaml:8: model.encoder")
    three = refusal(tmp_path, MANY.replace("[a, b, c, d]", "[a, b]"), "model.library=smp").splitlines()
    assert sorted(line.split(": ")[0].strip().removeprefix(f"{tmp_path}/") for line in three[1:]) == [
        "c.yaml:6", "c.yaml:7", "command line"
    ]  # fmt: skip
    assert refusal(tmp_path, MANY, "distill.temperature=2").startswith("command line: distill.teacher is missing")


def test_fewer_classes_name_what_they_no_longer_fit(tmp_path: Path) -> None:
    lines = refusal(tmp_path, MANY, "data.classes=[a,b]").splitlines()
    assert lines[1:] == [
        "  command line: data.palette: has 4 colors, but data.classes has 2 names: give one color per class",
        "  command line: data.label_map: maps to 3, but data.classes has 2 names (ids 0 to 1): map to these ids, or to "
        "data.ignore_index = 255",
    ]
    complete = MANY.replace("5: 3", "1: 1, 2: 2, 3: 3")
    message = refusal(tmp_path, complete, "data.classes=[a,b]", "data.palette=null")
    assert "data.label_map: maps to 2, 3, but data.classes has 2 names (ids 0 to 1): name 4 classes in" in message
    load_config(write(tmp_path, MANY.replace("5: 3", "5: 255, 6: 3")))


def test_lower_bounds_of_the_reference_are_those_of_the_check() -> None:
    bound = r"^- `((?:train|optim|eval|log|checkpoint)\.\w+)`†? \((?:integer|number) (≥|>) (\d+)"
    found = re.findall(bound, config_reference(), re.M)
    assert len(found) >= 20
    for key, sign, least in found:
        with pytest.raises(ConfigError, match=re.escape(key)):
            config_of({**MINIMAL, "data": {**MINIMAL["data"]}}, [f"{key}={int(least) - (sign == '≥')}"])


def test_every_shipped_config_passes_the_schema() -> None:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in CONFIGS:
        load_config(path)
        content = yaml.safe_load(path.read_text())
        assert [f"{path.name}: {error.message}" for error in validator.iter_errors(content)] == []
    broken = {**content, "train": {**content["train"], "batch_size": "many"}, "modell": {}}
    assert {tuple(error.absolute_path) for error in validator.iter_errors(broken)} == {(), ("train", "batch_size")}


@pytest.mark.parametrize(
    ("num_keys", "first", "last"),
    [
        (1, "config: unknown key k0: the sections are name, ", ""),
        (50, "50 problems in the config:", "  config: unknown key k49: "),
        (51, "51 problems in the config:", "  and 1 more"),
    ],
)
def test_problems_are_counted_and_the_first_50_listed(num_keys: int, first: str, last: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config({**MINIMAL, **{f"k{i}": 0 for i in range(num_keys)}})
    lines = str(caught.value).splitlines()
    assert (lines[0][: len(first)], lines[-1][: len(last)]) == (first, last)
    assert len(lines) == (1 if num_keys == 1 else num_keys + 1)


def test_resume_refuses_keys_that_change_the_training() -> None:
    old = validate_config(MINIMAL)
    harmless = validate_config(
        MINIMAL | {"train": {"epochs": 200}, "log": {"every_steps": 1}, "data": {**MINIMAL["data"], "workers": 0}}
    )
    assert resume_differences(old.model_dump(mode="json"), harmless) == []
    other = validate_config(MINIMAL | {"optim": {"lr": 0.02}, "seed": 3})
    assert resume_differences(old.model_dump(mode="json"), other) == ["optim.lr: 0.01 -> 0.02", "seed: 0 -> 3"]
    earlier = old.model_dump(mode="json")
    del earlier["train"]["ema"]  # a key that the version which saved it did not have
    assert resume_differences(earlier, harmless) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
        max_leaves=12,
    )
)
def test_any_value_is_accepted_or_a_config_error(value: object) -> None:
    for key in RunConfig.model_fields:
        try:
            config = validate_config({**MINIMAL, key: value})
        except ConfigError:
            continue
        assert validate_config(config.model_dump()) == config


def test_config_with_another_loss_drops_the_options_at_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    raw = {**MINIMAL, "loss": {"name": "tversky"}, "optim": {"name": "adam"}}
    whole = validate_config(raw).model_dump(mode="json")
    path.write_text(yaml.safe_dump(whole))
    config = load_config(path, ["loss.name=dice", "optim.name=sgd", "optim.options.nesterov=true"])
    assert config.loss.options == {"smooth": 1.0}
    assert config.optim.options == {"nesterov": True}
    whole["optim"]["options"], whole["loss"]["options"]["beta"] = {"betas": [0.5, 0.9]}, 0.2
    said = refusal(tmp_path, yaml.safe_dump(whole), "optim.name=sgd", "loss.name=dice").splitlines()
    assert sorted(line.partition("unknown key ")[2] for line in said[1:]) == [
        "loss.options.beta: no option of dice: use smooth", "optim.options.betas: no option of sgd: use nesterov"
    ]  # fmt: skip

"""Reports: what is in the page is what the run has written and what the model does, and nothing in it is alive."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.assembly.data import build_dataset
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.errors import ConfigError, RunError, StorageError
from segapp.inference.predict.predictor import predict_image
from segapp.report import charts
from segapp.report.charts import ChartCurve, Frame
from segapp.report.compare import compare_runs, print_comparison
from segapp.report.images import count_split, evaluate_split, iou_of, mean_of_known
from segapp.report.page import _memory_rows, class_rows, loss_chart, miou_curves, read_run_report, write_report
from segapp.run import words
from segapp.run.events import Alert, DeviceMemory, Gpu0Bsz, Memory, Settings, Step, Topology, Val
from segapp.run.folder import RunFolder
from segapp.view.history import LossHistory
from tests.support.fault_runs import tiny_config
from tests.support.recorded_runs import RecordedRun
from tests.support.runs import TINY_SIZES_PX, events, train

KEY = re.compile(r'<span class="key (c\d)"><svg.*?</svg>([^<]*)<')
VOID = {"meta", "img", "br", "link", "hr"}


class Page(html.parser.HTMLParser):
    """Tags in balance, text, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(path: Path) -> Page:
    page = Page(path.read_text())
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "link", "object")]
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith("data:image/" if name == "src" else "#")
    return page


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_root: Path) -> tuple[Path, Path]:
    """Two runs of one network, the second a shorter one."""
    root = tmp_path_factory.mktemp("report")
    for name, epochs in (("run", 2), ("short", 1)):
        config = tiny_config(
            tiny_root,
            model={"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
            optim={"name": "adamw", "lr": 0.003},
            train={"epochs": epochs, "batch_size": 3, "ema": None},
            parallel={"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1},
            checkpoint={"every_steps": None},
        )
        assert train(config, root / name) == 0
    return root / "run", root / "short"


@pytest.fixture(scope="module")
def trained(both: tuple[Path, Path]) -> Path:
    return both[0]


@pytest.fixture(scope="module")
def model(trained: Path) -> TrainedModel:
    return load_trained(str(trained))


@pytest.fixture(scope="module")
def dataset(model: TrainedModel) -> Any:
    return build_dataset(model.config.data, model.scheme, "val", is_training=False, seed=0)


def test_report_shows_the_values_of_run_and_model(
    trained: Path, model: TrainedModel, dataset: Any, tmp_path: Path
) -> None:
    page = read(write_report(str(trained), tmp_path / "page.html", num_worst=3))
    val = events(trained, "val")[-1]
    config = "encoder_depth: 3"
    info = json.loads((trained / "run.json").read_text())
    started = (f"started on {info['host']};", f"torch {info['versions']['torch']}, cuda ")
    for wanted in (f"{100 * val['miou']:.1f} %", "2 of 2", config, "ground", "box", "disc", *started):
        assert wanted in page.text
    assert "model.options" not in page.text
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    found = evaluate_split(model, dataset, "val", 3)
    assert len(found.worst) == 3
    *pictures, first_batch = pictures
    assert len(pictures) == 3 * 4
    stored = (trained / "samples" / "first_batch.png").read_bytes()
    assert base64.b64decode(str(first_batch).removeprefix("data:image/png;base64,")) == stored
    ids = {attributes.get("id") for _, attributes in page.tags}
    links = [str(attributes["href"]) for tag, attributes in page.tags if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= ids
    for image in found.worst:
        assert Path(image.files[0]).name == image.name
        assert all(file in page.text for file in image.files)
    sizes = []
    for address in pictures:
        data = base64.b64decode(str(address).split(",", 1)[1])
        sizes.append(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).shape[:2])
    expected = [TINY_SIZES_PX[int(Path(image.name).stem) % len(TINY_SIZES_PX)] for image in found.worst]
    assert sizes == [size for size in expected for _ in range(4)]
    assert len(set(sizes)) > 1


def test_a_class_has_one_color_in_screen_report_and_predictions(
    trained: Path, model: TrainedModel, dataset: Any, tmp_path: Path
) -> None:
    image = evaluate_split(model, build_one(dataset, 0), "val", 1).worst[0]
    (start,) = events(trained, "run_start")  # the legend of the TUI is made of its palette
    legend = dict(image.legend)
    assert legend.items() <= dict(zip(start["classes"], map(tuple, start["palette"]), strict=True)).items()
    pixels, target = dataset.read(0)
    labels = predict_image(model.model, model.inference, pixels, model.device)
    for ids, name in ((target, "target"), (labels, "prediction")):
        data = np.frombuffer(base64.b64decode(image.pictures[name].split(",")[1]), np.uint8)
        shown = cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1]
        for number in np.unique(ids[target != 255]).tolist():
            assert {tuple(color) for color in shown[(ids == number) & (target != 255)].tolist()} == {
                legend[model.scheme.names[number]]
            }
    sample = sorted((trained / "samples").glob("epoch_*.png"))[-1]  # image, prediction and target side by side
    colors = {tuple(color) for color in cv2.imread(str(sample))[:, 64:, ::-1].reshape(-1, 3).tolist()}
    assert colors & set(legend.values())
    page = write_report(str(trained), tmp_path / "page.html").read_text()
    for color in legend.values():
        assert page.count(f"background:rgb({','.join(map(str, color))})") >= 2  # in the class table and in a legend


def test_report_scores_equal_the_evaluation(trained: Path, model: TrainedModel, dataset: Any) -> None:
    done: list[int] = []
    found = evaluate_split(model, dataset, "val", 2, done.append)
    assert done[-1] == len(dataset)
    assert evaluate_split(model, build_one(dataset, 0), "val", 0).worst == []
    best = max(event["miou"] for event in events(trained, "val"))
    assert found.scores.miou == pytest.approx(best, abs=1e-6)
    mious = [evaluate_split(model, build_one(dataset, i), "val", 1).worst[0].miou for i in range(len(dataset))]
    assert [image.miou for image in found.worst] == sorted(mious)[:2]
    assert found.matrix.sum() == found.scores.num_valid_px


def test_counts_of_images_are_those_of_their_masks(model: TrainedModel, dataset: Any) -> None:
    done: list[int] = []
    found = count_split(model, dataset, "val", done.append)
    assert done == list(range(1, len(dataset) + 1))
    labels = [
        predict_image(model.model, model.inference, dataset.read(i)[0], model.device) for i in range(len(dataset))
    ]
    targets = [dataset.read(i)[1] for i in range(len(dataset))]
    for counts, target, label in zip(found.counts, targets, labels, strict=True):
        valid = target != 255
        for number in range(3):
            own, hit = (target == number) & valid, (label == number) & valid
            assert counts[number].tolist() == [(own & hit).sum(), own.sum(), hit.sum()]
    total = found.total.matrix.numpy()
    assert np.array_equal(np.stack([np.diag(total), total.sum(1), total.sum(0)], 1), found.counts.sum(0))
    assert found.names == tuple(pair.name for pair in dataset.pairs)
    assert (found.classes, found.split) == (("ground", "box", "disc"), "val")


def test_iou_of_counts_leaves_out_classes_without_pixels() -> None:
    counts = np.array([[[1, 2, 3], [0, 0, 0], [0, 0, 5]], [[0, 0, 0]] * 3])
    assert iou_of(counts).tolist()[0] == [0.25, pytest.approx(np.nan, nan_ok=True), 0.0]
    assert mean_of_known(iou_of(counts)).tolist() == [0.125, pytest.approx(np.nan, nan_ok=True)]


def build_one(dataset: Any, index: int) -> Any:
    return type(dataset)([dataset.pairs[index]], dataset.scheme)


def test_report_without_model_has_the_rest_and_the_reason(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "samples").mkdir()
    for name in ("events.jsonl", "run.json", "config.yaml", "samples/first_batch.png"):
        (folder / name).write_bytes((trained / name).read_bytes())
    page = read(write_report(str(folder)))
    assert [attributes["alt"] for tag, attributes in page.tags if tag == "img"] == ["first batch of copy"]
    assert (folder / "report.html").is_file()
    assert "No confusion matrix and no images" in page.text
    assert "2 of 2" in page.text


def test_hostile_names_are_inert_in_the_report(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>\x1b[31m[/b]"
    run = RecordedRun(tmp_path / "run", classes=[nasty, '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}"])
    info = json.loads(run.folder.run_json.read_text())
    info["process"]["host"], info["versions"] = nasty, {nasty: "<img src=x>"}
    run.folder.run_json.write_text(json.dumps(info))
    run.epoch()
    run.alert("oom", nasty)
    run.end("failed", nasty)
    text = write_report(str(run.folder.path), has_pictures=False).read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    page = Page(text)
    assert "{{ 7 * 7 }}" in page.text
    assert page.text.count("alert(1)") > page.text.partition("Settings")[0].count("alert(1)") > 2
    assert "started on <script>" in page.text


def test_unreportable_run_is_one_clear_error(tmp_path: Path, trained: Path) -> None:
    RunFolder.create(path=tmp_path / "begun").write_info()
    with pytest.raises(RunError, match="no events yet"):
        write_report(str(tmp_path / "begun"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another --out"):
        write_report(str(trained), tmp_path / "file" / "page.html", has_pictures=False)


def test_comparison_names_the_differing_settings(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("events.jsonl", "run.json"):
        (other / name).write_bytes((trained / name).read_bytes())
    text = (trained / "config.yaml").read_text()
    (other / "config.yaml").write_text(re.sub(r"(?m)^(\s+)gpu0_bsz: 1$", r"\1gpu0_bsz: 2", text))
    found = compare_runs([str(trained), str(other)], tmp_path / "page.html")
    assert found["differences"] == {"parallel.gpu0_bsz": [1, 2]}
    capsys.readouterr()
    print_comparison(found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["differences", "parallel.gpu0_bsz"]
    columns = lines[1].index("1"), lines[1].rindex("2")
    assert all(lines[3][at - 1] == " " != lines[3][at] for at in columns), "results are in the columns of the settings"
    first, second = found["runs"]
    assert {**first, "name": ""} == {**second, "name": ""}
    assert first["best_miou"] == max(event["miou"] for event in events(trained, "val"))
    assert "parallel.gpu0_bsz" in read(tmp_path / "page.html").text
    assert found["same_images"] is None
    assert "best.pt" in found["why_not"] or "checkpoint" in found["why_not"]
    assert found["why_not"] in read(tmp_path / "page.html").text
    with pytest.raises(ConfigError, match="at least two runs, and got 1"):
        compare_runs([str(trained)])
    with pytest.raises(ConfigError, match="nowhere"):
        compare_runs(["nowhere"])


def test_runs_are_compared_on_the_same_images_with_pictures(
    both: tuple[Path, Path], model: TrainedModel, dataset: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run and itself have no difference; the mIoU equals the evaluation in training."""
    names = [str(both[0]), str(both[0]), str(both[1])]
    found = compare_runs(names, tmp_path / "page.html", num_images=2)
    same, best = found["same_images"], [run["best_miou"] for run in found["runs"]]
    assert (same["num_images"], same["num_left_out"], same["split"]) == (len(dataset), 0, "val")
    assert [run["miou"] for run in same["runs"]] == pytest.approx(best, abs=1e-6)
    assert [run["difference"] for run in same["runs"][1:]] == [0.0, pytest.approx(best[2] - best[0], abs=1e-6)]
    assert best[2] != best[0]
    assert [image["effects"][0] for image in same["images"]] == [0.0, 0.0]
    train_names = {
        pair.name for pair in build_dataset(model.config.data, model.scheme, "train", is_training=False, seed=0).pairs
    }
    of_train = compare_runs(names[::2], split="train", num_images=99)["same_images"]
    assert (of_train["split"], {image["name"] for image in of_train["images"]}) == ("train", train_names)
    assert "shown" not in same["images"][0]
    page = read(tmp_path / "page.html")
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 2 * (2 + 2 * 3)
    for one, again, other in (pictures[1:4], pictures[5:8]):  # predictions, and wrong pixels
        assert one == again != other
    percents = [f"{100 * miou:.1f} %" for miou in best]
    row = f"{percents[0]} {percents[1]} +0.0 {percents[2]} {100 * (best[2] - best[0]):+.1f} "
    assert f"mIoU over {same['num_scored']} classes {row}" in page.text
    same["runs"][1] |= {"difference": -0.0551, "iou_difference": {"ground": 0.012, "box": None, "disc": -0.3}}
    same["runs"][2] |= {"difference": 0.25, "iou_difference": {"ground": 0.5, "box": None, "disc": 0.1}}
    capsys.readouterr()
    print_comparison(found)
    rows = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    shown = [(row[0].split()[0], *row[3::2]) for row in rows if re.match(r"mIoU \(|ground|box|disc", row[0])]
    assert shown == [("mIoU", "-5.5", "+25.0"), ("ground", "+1.2", "+50.0"), ("disc", "-30.0", "+10.0")]
    assert compare_runs(names, has_images=False)["why_not"] == "left out because of --no-images"


def test_loss_chart_shows_evaluations_and_the_last_best_one(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=5)
    for _ in range(3):
        run.epoch()
    chart = loss_chart([read_run_report(str(run.folder.path))])
    assert re.findall(r"<title>([\w ]+) at (\d+):", chart) == [("validation loss", str(5 * i)) for i in (1, 2, 3)]
    assert re.findall(r"best, epoch \d", chart) == ["best, epoch 3"]
    mean = float(np.mean([event["loss"] for event in events(run.folder.path, "step") if event["epoch"] == 3]))
    label = f"training loss (smoothed over about 2 logged steps), mean of epoch 3: {mean:.3f}"
    keys = [("c0", label), ("c1", "validation loss")]
    assert re.findall(KEY, chart) == keys
    assert 'class="band c0"' in chart
    other = RecordedRun(tmp_path / "other", steps_per_epoch=5)
    other.epoch()
    reports = [read_run_report(str(each.folder.path)) for each in (run, other)]
    chart = loss_chart(reports)
    assert re.findall(KEY, chart) == [
        ("c0", f"run, mean of epoch 3: {mean:.3f}"),
        ("c1", f"other, mean of epoch 1: {reports[1].view.loss.mean:.3f}"),
    ]
    assert "band" not in chart
    assert "<title>" not in chart
    curves = miou_curves(reports)
    last = [words.number(report.view.vals[-1].miou) for report in reports]
    assert [(curve.label, curve.color, len(curve.y)) for curve in curves] == [
        (f"run, last {last[0]}", 0, 3), (f"other, last {last[1]}", 1, 1),
    ]  # fmt: skip
    assert [list(curve.y) for curve in curves] == [[val.miou for val in report.view.vals] for report in reports]
    assert miou_curves(reports[:1])[0].label == "mIoU"


def points(series: LossHistory) -> list[tuple[float, float]]:
    return list(zip(series.step.tolist(), series.high.tolist(), strict=True))


def test_run_report_has_terms_changes_and_alerts(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    for step in range(1, 7):
        terms = {f"term{i}": float(step * i) for i in range(20)}
        run.write(Step(epoch=1, step=step, loss=1.0, lr=0.1 * step, images_per_s=10.0 * step, terms=terms))
    run.change_gpu0(6)
    run.alert("hang", "no progress")
    run.write_start(resumed_from_step=4)
    run.write(Step(epoch=1, step=5, loss=1.0, lr=0.7, images_per_s=70.0, terms={**terms, "term2": 1.5}))
    report = read_run_report(str(run.folder.path), ("lr", "images_per_s"))
    assert [change.status for change in report.view.gpu0.changes] == ["applied"]
    assert [alert.message for alert in report.view.last_alerts] == ["no progress"]
    assert points(report.series["lr"]) == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3)), (4, 0.4), (5, 0.7)]
    assert points(report.series["images_per_s"]) == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0), (5, 70.0)]
    assert report.terms == [f"term{i}" for i in range(16)]
    page = read(write_report(str(run.folder.path), has_pictures=False)).text
    assert [f"term{i}" for i in range(20) if f" term{i} " in page] == report.terms
    assert points(report.series["terms.term2"]) == [(1, 2.0), (2, 4.0), (3, 6.0), (4, 8.0), (5, 1.5)]
    assert report.duration_s == pytest.approx(run.clock.now_s - 1_760_000_000.0)


def test_first_lines_of_a_report_say_what_the_alerts_said(tmp_path: Path) -> None:
    """The newest message of each kind and reason, once; what is only logged is in the section of the alerts."""
    run = RecordedRun(tmp_path / "run")
    for _ in range(2):  # a start and a resume
        run.alert("classes", "class without a pixel in the 9 masks of split train: disc; the model cannot learn it")
    run.alert("settings", "the learning rate is that of the checkpoint")
    for name in ("box", "disc", "pole"):
        run.write(Alert(kind="learning", reason="unpredicted", message=f"{name} has an IoU of 0", classes=[name]))
    run.write(Alert(kind="learning", reason="overfitting", message="the model overfits: set train.early_stop"))
    run.epoch()
    run.end("finished")
    page = write_report(str(run.folder.path), has_pictures=False).read_text()
    head, _, rest = page.partition("<div class=facts>")
    assert re.findall("<li>(.*)</li>", head.replace("</li><li>", "</li>\n<li>")) == [
        "<b>classes</b>: class without a pixel in the 9 masks of split train: disc; the model cannot learn it",
        '<b>learning</b>: pole has an IoU of 0 (<a href="#alerts">and 2 more</a>)',
        "<b>learning</b>: the model overfits: set train.early_stop",
    ]
    for message in ("box has an IoU of 0", "disc has an IoU of 0", "the learning rate is that of the checkpoint"):
        assert message in rest.partition("<h2 id=alerts>")[2]


def test_class_table_shows_scores_changes_and_absent_classes(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", classes=["a", "b", "c", "d"])
    run.write(Val(epoch=1, step=1, loss=1.0, miou=0.4, iou=[0.1, 0.9, 0.9, 0.9]))
    run.write(Val(epoch=2, step=2, loss=1.0, miou=0.4, iou=[0.4, 0.3, 0.5, None]))
    run.write(
        Val(epoch=3, step=3, loss=1.0, miou=0.4, iou=[0.6, None, 0.25, 0.0], recall=[0.7, None, 0.3], precision=[0.8])
    )
    report = read_run_report(str(run.folder.path))
    assert report.view.start is not None
    colors = [(i, 0, 0) for i in range(4)]
    report.view.start = report.view.start.model_copy(update={"palette": colors})
    rows = class_rows(report, None)
    assert [tuple(vars(row).values()) for row in rows] == [
        ("d", 0.0, None, 0.0, None, None, None, (3, 0, 0)),
        ("c", 0.25, -0.25, 0.4, 0.3, None, None, (2, 0, 0)),  # dice of 2 * 0.25 / 1.25
        ("a", 0.6, pytest.approx(0.2), pytest.approx(0.75), 0.7, 0.8, None, (0, 0, 0)),
        ("b", None, None, None, None, None, None, (1, 0, 0)),
    ]
    words = read(write_report(str(run.folder.path), has_pictures=False)).text
    assert "Absent from targets and predictions: b." in words


def test_memory_table_has_each_split_and_device(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", num_devices=2, batch_size=8, gpu0_bsz=3)
    run.train(1)
    run.write(Memory(devices=[DeviceMemory(device=f"cuda:{i}", peak_mib=mib) for i, mib in enumerate((11264.0, 99e3))]))
    run.write(Gpu0Bsz(status="applied", old=3, new=2, split=[2, 6], observed_mib=[None, 2048.0], epoch=1))
    rows = _memory_rows(read_run_report(str(run.folder.path)))
    columns = ("split", "is_first", "device", "samples", "peak_mib", "total_mib", "frac")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ((2, 6), True, "cuda:0", 2, None, 22_528, None),
        ((2, 6), False, "cuda:1", 6, 2048.0, 22_528, 1 / 11),
        ((3, 5), True, "cuda:0", 3, 11264.0, 22_528, 0.5),
        ((3, 5), False, "cuda:1", 5, 99e3, 22_528, 1.0),
    ]


def test_report_lists_changes_of_recomputed_blocks_and_ranks(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", num_devices=2, batch_size=8, gpu0_bsz=3)
    run.train(10)
    run.write(Settings(step=10, recompute="all", blocks=[["layer1.0"], []], num_blocks=2, reason="out of memory"))
    run.train(7)
    topology = Topology(ranks=1, machines=1, old_ranks=2, old_machines=2)
    run.write(Settings(step=17, topology=topology, reason="without node2 cuda:0"))
    run.train(3)
    topology = Topology(ranks=3, machines=2, old_ranks=1, old_machines=1)
    run.write(Settings(step=20, topology=topology, reason="with node3"))
    words = read(write_report(str(run.folder.path), has_pictures=False)).text
    assert "Since step 11: 1·0 of 2 blocks recomputed in the backward pass (out of memory)" in words
    assert "cuda:0: layer1.0 cuda:1: none" in words
    assert "after step 17: 1 rank on 1 machine (before: 2 on 2): without node2 cuda:0" in words
    assert "after step 20: 3 ranks on 2 machines (before: 1 on 1): with node3" in words


def test_report_and_compare_commands_write_what_they_say(trained: Path, command: Any) -> None:
    code, out, _ = command("report", trained, "--out", "page.html", "--worst", "1")
    assert (code, "written: page.html" in out) == (0, True)
    assert len([1 for tag, _ in read(Path("page.html")).tags if tag == "img"]) == 5  # one image, the first batch
    assert command("report", trained, "--out", "page.html", "--no-images")[0] == 0
    assert "img" not in dict(read(Path("page.html")).tags)
    words = ["compare", trained, trained, "--no-images"]
    assert len(json.loads(command(*words, "--json")[1])["runs"]) == 2
    assert "best mIoU" in command(*words)[1]
    code, _, said = command("report", "nothing")
    assert (code, len(said.strip().splitlines())) == (2, 1)


def test_chart_line_has_the_coordinates_of_its_values() -> None:
    chart = charts.line_chart(
        [ChartCurve("a", np.array([0, 10]), np.array([0.0, 1.0]))], Frame("step", "y", bottom=0.0, top=1.0)
    )
    svg = picture_of(chart)
    path = next(e for e in svg.iter() if e.get("class") == "line c0").get("d")
    assert path is not None
    (x0, y0), (x1, y1) = ([float(n) for n in point.split()] for point in re.split("[ML]", path)[1:])
    ticks = {e.text: (float(e.get("x")), float(e.get("y"))) for e in svg.iter("text") if e.get("class") == "end"}  # type: ignore[arg-type]
    assert (x0, x1) == (62, charts.WIDTH_PX - 14)
    assert y0 - y1 == pytest.approx((260 - 34 - 12) / 1.03, rel=0.03)
    assert ticks["0"][1] - 4 == pytest.approx(y0, abs=0.2)
    long = charts.line_chart([ChartCurve("b", *np.tile(np.arange(2.0 * 5001), (2, 1)))], Frame("step", "y"))
    drawn = re.search(r'class="line c0" d="([^"]*)"', long)
    assert drawn is not None
    points = [[float(n) for n in point.split()] for point in re.split("[ML]", drawn[1])[1:]]
    assert len(points) == 2502  # every fourth, and the last
    assert (points[0][0], points[-1][0]) == (62, charts.WIDTH_PX - 14)


def picture_of(chart: str) -> ET.Element:
    """Returns the picture of a chart."""
    found = re.search(r"<svg .*?</svg>", chart)
    assert found is not None
    return ET.fromstring(re.sub(r"=(role|img|mark|grid|axis|chart)\b", r'="\1"', found[0]))


def test_curves_differ_without_color() -> None:
    x = np.arange(20.0)
    curves = [ChartCurve(f"run number {i} of eight", x, np.where(x < 19, x + i, 5.0 + i / 100), i) for i in range(8)]
    chart = charts.line_chart(curves, Frame("step", "y"))
    style = (Path(charts.__file__).parent / "templates" / "style.css").read_text()
    assert sorted(re.findall(r"\.c(\d+) \{ stroke:", style)) == [str(i) for i in range(charts.NUM_COLORS)]
    dashes = re.findall(r"\.line\.c\d \{ stroke-dasharray: ([\d ]+); \}", style)
    assert len(dashes) == len(set(dashes)) == charts.NUM_COLORS - 1  # the first is solid
    assert all(curve.label in chart for curve in curves), "the legend"
    markers = {(node.get("class"), node.get("d")) for node in picture_of(chart).iter("path")}
    shapes = {kind: d for kind, d in markers if kind is not None and kind.startswith("dot")}
    assert len(shapes) == 8
    assert len(set(shapes.values())) == 4  # the second four are filled


def test_chart_of_few_values_has_markers_gaps_and_whole_steps() -> None:
    def chart_of(values: list[float], **options: Any) -> str:
        x = np.arange(len(values)) + 36.0
        return charts.line_chart([ChartCurve("a", x, np.array(values), **options)], Frame("step", "y"))

    for is_dotted in (False, True):
        nodes = picture_of(chart_of([np.nan, 0.25, np.nan], is_dotted=is_dotted)).iter("path")
        assert len({node.get("transform") for node in nodes if node.get("class") == "dot c0"}) == 1
    broken = re.search(r'class="line c0" d="([^"]*)"', chart_of([1.0, np.nan, 2.0, 3.0]))
    assert broken is not None
    assert broken[1].count("M") == 2
    marks = [node.text for node in picture_of(chart_of([1.0, 2.0, 3.0])).iter("text") if node.get("class") == "mid"]
    assert marks[:2] == ["36", "37"]
    for values in ([], [np.nan], [np.inf, np.nan]):
        assert "nothing was recorded" in chart_of(values)

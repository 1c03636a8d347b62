"""The Grafana dashboards as JSON: `python -m mqmk.deploy.grafana.generator deploy/grafana/dashboards`; a test compares.

Needs grafana-foundation-sdk, a development dependency: the files that it writes are checked in.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any, Final

from mqmk.deploy.grafana.generator.learning import LEARNING
from mqmk.deploy.grafana.generator.matching import MATCHING
from mqmk.deploy.grafana.generator.overview import OVERVIEW
from mqmk.deploy.grafana.generator.panels import Board, Look, Panel
from mqmk.deploy.grafana.generator.serving import SERVING
from mqmk.deploy.grafana.generator.system import SYSTEM

with warnings.catch_warnings():
    # It prefers the second dashboard schema, which Grafana before 12 cannot read from provisioned files.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common, heatmap, stat, statetimeline, table, timeseries
    from grafana_foundation_sdk.builders import dashboard as build
    from grafana_foundation_sdk.builders import prometheus as ask
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import prometheus as prometheus_models

SOURCE: Final = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
BOARDS: Final = (OVERVIEW, MATCHING, LEARNING, SERVING, SYSTEM)
TAG: Final = "mqmk"
INSTANT: Final = ("stat", "table", "matrix")
MATRIX: Final = {"columnField": "matched_task", "rowField": "true_task", "valueField": "Value", "emptyValue": "zero"}
HIDDEN: Final = {"excludeByName": {"Time": True, "__name__": True, "instance": True, "job": True, "part": True}}
PANELS: Final[dict[Look, Any]] = {
    "stat": stat.Panel,
    "timeseries": timeseries.Panel,
    "bars": timeseries.Panel,
    "table": table.Panel,
    "matrix": table.Panel,
    "heatmap": heatmap.Panel,
    "states": statetimeline.Panel,
}


def render(board: Board) -> str:
    """One dashboard's JSON."""
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .editable()
        .refresh("30s")
        .time("now-24h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .annotation(_swaps())
        .link(build.DashboardLink("MQMK").type(models.DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True))
    )
    if board.by_task:
        made = made.with_variable(_task_variable())
    for row in board.rows:
        made = made.with_row(build.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel))
    return as_text(made.build())


def as_text(board: models.Dashboard) -> str:
    """The JSON of a dashboard, with stable panel ids, so that links keep working."""
    fields = json.loads(JSONEncoder(sort_keys=True).encode(board))
    for place, panel in enumerate(fields["panels"]):
        panel["id"] = place + 1
    for variable in fields["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):  # the SDK adds them to every variable; they belong to intervals
            variable.pop(name, None)
    return json.dumps(fields, indent=2) + "\n"


def write(folder: Path) -> None:
    """All dashboards."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(render(board))


def _panel(panel: Panel) -> Any:
    made = PANELS[panel.look]().title(panel.title).description(panel.description).datasource(SOURCE)
    made = made.span(panel.width).height(panel.height).unit(panel.unit)
    for place, query in enumerate(panel.queries):
        asked = ask.Dataquery().expr(query.expr).ref_id("ABCDEFGH"[place]).datasource(SOURCE)
        asked = asked.legend_format(query.legend or "__auto")
        if panel.look in INSTANT:
            asked = asked.instant()
        if panel.look in ("table", "matrix"):
            asked = asked.format(prometheus_models.PromQueryFormat.TABLE)
        if panel.look == "heatmap":
            asked = asked.format(prometheus_models.PromQueryFormat.HEATMAP)
        made = made.with_target(asked)
    return _style(made, panel)


def _style(made: Any, panel: Panel) -> Any:
    """Options of the kind of panel."""
    if panel.words:
        made = made.mappings([_words(panel)])
    if panel.limits and panel.good != "none":
        made = made.thresholds(_thresholds(panel))
    match panel.look:
        case "stat":
            color = models.FieldColorModeId.THRESHOLDS if panel.limits else models.FieldColorModeId.FIXED
            made = made.color_scheme(build.FieldColor().mode(color).fixed_color("text"))
            return made.graph_mode(common_models.BigValueGraphMode.NONE)
        case "timeseries" | "bars":
            made = made.fill_opacity(60 if panel.look == "bars" else 8).span_nulls(True)
            if panel.look == "bars":
                return made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
            return made.axis_soft_min(0)
        case "matrix":
            made = made.color_scheme(build.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_BL_PU))
            shown = [models.DynamicConfigValue("custom.cellOptions", {"type": "color-background"})]
            made = made.override_by_field_type("number", shown)
            return made.with_transformation(models.DataTransformerConfig("groupingToMatrix", options=MATRIX))
        case "table":
            return made.with_transformation(models.DataTransformerConfig("organize", options=HIDDEN))
    return made


def _words(panel: Panel) -> Any:
    named = {
        str(value): models.ValueMappingResult(text=text, color=colour, index=place)
        for place, (value, (text, colour)) in enumerate(panel.words.items())
    }
    return models.ValueMap(options=named)


def _thresholds(panel: Panel) -> Any:
    assert panel.limits is not None
    first, second = panel.limits
    steps = [(None, "red"), (second, "yellow"), (first, "green")]
    if panel.good == "low":
        steps = [(None, "green"), (first, "yellow"), (second, "red")]
    made = [models.Threshold(value=value, color=color) for value, color in steps]
    return build.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _task_variable() -> Any:
    every = models.VariableOption(selected=True, text="All", value="$__all")
    return (
        build.QueryVariable("task")
        .label("Task")
        .datasource(SOURCE)
        .query({"query": "label_values(mqmk_heldout_task_matching_ratio, task)", "refId": "task"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(every)
    )


def _swaps() -> Any:
    return (
        build.AnnotationQuery()
        .name("New version")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("purple")
        .target(ask.Dataquery().expr("changes(max(mqmk_pool_version)[2m:15s]) > 0").ref_id("A").datasource(SOURCE))
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))

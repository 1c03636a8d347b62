"""Does the machine keep up? Use, saturation and errors of what the service runs on."""

from typing import Final

from mqmk.deploy.dashboard_panels import Board, Panel, Query, Row, quantile

KIND: Final = 'label_replace(ray_component_rss_bytes, "Component", "$1", "Component", ".*/([^/]+)")'
"""A driver is called after the path of its Python: without the folder."""
WORKS: Final = {1: ("works", "green"), 0: ("does not work", "red")}

SYSTEM: Final = Board(
    "mqmk-system",
    "MQMK: does the machine keep up?",
    "Use, saturation and errors of what it runs on.",
    (
        Row(
            "Parts",
            (
                Panel(
                    "Dependencies",
                    "1 works, 0 does not. `mqmk-daemon status` says why.",
                    "states",
                    (Query("min by (dependency) (mqmk_dependency_up)", "{{dependency}}"),),
                    width=12,
                    words=WORKS,
                ),
                Panel(
                    "Targets that Prometheus reaches",
                    "1 is scraped, 0 is not.",
                    "states",
                    (Query('up{job="mqmk"}', "{{part}}"),),
                    width=12,
                    words={1: ("scraped", "green"), 0: ("missing", "red")},
                ),
            ),
        ),
        Row(
            "Ray's nodes",
            (
                Panel(
                    "CPU",
                    "Use of each node's CPUs.",
                    "timeseries",
                    (Query("ray_node_cpu_utilization", "{{ip}}"),),
                    "percent",
                ),
                Panel(
                    "Memory",
                    "Use of each node's memory.",
                    "timeseries",
                    (Query("ray_node_mem_used / ray_node_mem_total", "{{ip}}"),),
                    "percentunit",
                ),
                Panel(
                    "GPU",
                    "Use of each GPU; empty where there is none.",
                    "timeseries",
                    (Query("ray_node_gpus_utilization", "{{ip}} {{GpuIndex}}"),),
                    "percent",
                ),
                Panel(
                    "Disk traffic",
                    "Bytes a second that each node reads and writes.",
                    "timeseries",
                    (
                        Query("ray_node_disk_io_read_speed", "read {{ip}}"),
                        Query("ray_node_disk_io_write_speed", "write {{ip}}"),
                    ),
                    "Bps",
                ),
                Panel(
                    "Object store",
                    "Shared memory of Ray that is in use.",
                    "timeseries",
                    (Query("sum by (NodeAddress) (ray_object_store_used_memory)", "{{NodeAddress}}"),),
                    "bytes",
                ),
                Panel(
                    "Processes",
                    "Memory of Ray's processes by kind.",
                    "timeseries",
                    (Query(f"sum by (Component) ({KIND})", "{{Component}}"),),
                    "bytes",
                ),
            ),
        ),
        Row(
            "The daemon",
            (
                Panel(
                    "Disk of the state directory",
                    "Free share. Training and publishing wait when it is full; serving goes on.",
                    "timeseries",
                    (Query("mqmk_state_disk_free_bytes / mqmk_state_disk_size_bytes", "free"),),
                    "percentunit",
                    good="high",
                    limits=(0.15, 0.05),
                ),
                Panel(
                    "Memory",
                    "Resident memory of the daemon.",
                    "timeseries",
                    (Query('process_resident_memory_bytes{part="daemon"}', "daemon"),),
                    "bytes",
                ),
                Panel(
                    "Its loop",
                    "Time of one turn of the loop (95 of 100), and time since it last came round.",
                    "timeseries",
                    (
                        Query(quantile(0.95, "mqmk_pass_seconds_bucket"), "95 %"),
                        Query("time() - (mqmk_last_pass_timestamp_seconds > 0)", "since the last"),
                    ),
                    "s",
                ),
                Panel(
                    "Size of the pool",
                    "Bytes of the current version's files.",
                    "timeseries",
                    (Query("max(mqmk_pool_bytes)", "pool"),),
                    "bytes",
                ),
                Panel(
                    "Commands of operators",
                    "Commands that wait, and that were answered in the last hour.",
                    "timeseries",
                    (
                        Query("max(mqmk_commands_pending)", "pending"),
                        Query("sum by (kind, result) (increase(mqmk_commands_total[1h]))", "{{kind}} {{result}}"),
                    ),
                ),
                Panel(
                    "What runs",
                    "Version of the package, backbone and configured matcher.",
                    "table",
                    (Query("mqmk_daemon_info"),),
                ),
            ),
        ),
    ),
)

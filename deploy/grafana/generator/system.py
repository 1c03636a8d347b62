"""System: utilization, saturation and errors of what the service runs on."""

from typing import Final

from mqmk.deploy.grafana.generator.panels import Board, Panel, Query, Row, quantile

KIND: Final = 'label_replace(ray_component_rss_bytes, "Component", "$1", "Component", ".*/([^/]+)")'
"""Ray names a driver by the path of its Python; without the folder."""
UP: Final = {1: ("up", "green"), 0: ("down", "red")}

SYSTEM: Final = Board(
    "mqmk-system",
    "MQMK: system",
    "Dependencies, Ray nodes, and the daemon.",
    (
        Row(
            "Dependencies",
            (
                Panel(
                    "Dependencies",
                    "State of each dependency. `mqmk-daemon status` shows why one is down.",
                    "states",
                    (Query("min by (dependency) (mqmk_dependency_up)", "{{dependency}}"),),
                    width=12,
                    words=UP,
                ),
                Panel(
                    "Scrape targets",
                    "Whether Prometheus reaches each target.",
                    "states",
                    (Query('up{job="mqmk"}', "{{part}}"),),
                    width=12,
                    words={1: ("scraped", "green"), 0: ("missing", "red")},
                ),
            ),
        ),
        Row(
            "Ray nodes",
            (
                Panel(
                    "CPU",
                    "CPU utilization of each node.",
                    "timeseries",
                    (Query("ray_node_cpu_utilization", "{{ip}}"),),
                    "percent",
                ),
                Panel(
                    "Memory",
                    "Memory utilization of each node.",
                    "timeseries",
                    (Query("ray_node_mem_used / ray_node_mem_total", "{{ip}}"),),
                    "percentunit",
                ),
                Panel(
                    "GPU",
                    "Utilization of each GPU; empty without GPUs.",
                    "timeseries",
                    (Query("ray_node_gpus_utilization", "{{ip}} {{GpuIndex}}"),),
                    "percent",
                ),
                Panel(
                    "Disk I/O",
                    "Bytes per second that each node reads and writes.",
                    "timeseries",
                    (
                        Query("ray_node_disk_io_read_speed", "read {{ip}}"),
                        Query("ray_node_disk_io_write_speed", "write {{ip}}"),
                    ),
                    "Bps",
                ),
                Panel(
                    "Object store",
                    "Used shared memory of each node.",
                    "timeseries",
                    (Query("sum by (NodeAddress) (ray_object_store_used_memory)", "{{NodeAddress}}"),),
                    "bytes",
                ),
                Panel(
                    "Process memory",
                    "Resident memory of Ray's processes by component.",
                    "timeseries",
                    (Query(f"sum by (Component) ({KIND})", "{{Component}}"),),
                    "bytes",
                ),
            ),
        ),
        Row(
            "Daemon",
            (
                Panel(
                    "State disk",
                    "Free space on the disk of the state directory. When it is full, training and publishing wait; "
                    "serving continues.",
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
                    "Main loop",
                    "Duration of one pass (p95), and time since the last pass.",
                    "timeseries",
                    (
                        Query(quantile(0.95, "mqmk_pass_duration_seconds_bucket"), "p95"),
                        Query("time() - (mqmk_last_pass_timestamp_seconds > 0)", "since last pass"),
                    ),
                    "s",
                ),
                Panel(
                    "Pool size",
                    "Size of the current version's files.",
                    "timeseries",
                    (Query("max(mqmk_pool_bytes)", "pool"),),
                    "bytes",
                ),
                Panel(
                    "Operator commands",
                    "Pending commands, and those finished in the last hour.",
                    "timeseries",
                    (
                        Query("max(mqmk_commands_pending)", "pending"),
                        Query("sum by (kind, result) (increase(mqmk_commands_total[1h]))", "{{kind}} {{result}}"),
                    ),
                ),
                Panel(
                    "Build info",
                    "Package version, backbone and configured matcher.",
                    "table",
                    (Query("mqmk_daemon_info"),),
                ),
            ),
        ),
    ),
)

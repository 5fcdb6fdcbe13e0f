"""Celery's settings, and the keys of their dictionaries."""

from __future__ import annotations

import re

from ..core.foreign_words import ALWAYS, ATTEMPTS, KEPT, OPTIONS
from .vocabulary import Use, but, differs, drops, each, has_none, lacks, maps, options, to

SETTING = "settings."
DROP = "remove it"
SCHEDULE = "it becomes an option of the task that it names"
BROKER = 'write ASYNCQ["REDIS"]: a logical database of Redis that Celery does not use'
ROUTE = "write queue_name= in @task(…), or in using() for one call"

USES_OF_SETTINGS: dict[str, Use] = {
    **each("broker_url broker_read_url broker_write_url", maps('ASYNCQ = {{"REDIS": {value}}}', BROKER), SETTING),
    **each(
        "broker_host broker_port broker_user broker_password broker_vhost broker_transport broker_use_ssl "
        "broker_login_method",
        but("", f"{BROKER}; RabbitMQ and SQS are not supported"),
        SETTING,
    ),
    "settings.broker_transport_options": but(
        "", 'visibility_timeout has no counterpart: ASYNCQ["LEASE_SECONDS"] is how long a worker may be silent'
    ),
    **each(
        "broker_channel_error_retry broker_connection_max_retries broker_connection_retry "
        "broker_connection_retry_on_startup "
        "broker_connection_timeout broker_failover_strategy broker_heartbeat broker_heartbeat_checkrate "
        "broker_native_delayed_delivery_queue_type broker_pool_acquire_timeout broker_pool_limit broker_backend",
        maps("", "remove it: connections to Redis are cared for, and workers wait while it is unreachable"),
        SETTING,
    ),
    "settings.result_backend": maps("", "remove it: results are rows of your database"),
    **each(
        "result_accept_content result_backend_always_retry result_backend_base_sleep_between_retries_ms "
        "result_backend_max_retries result_backend_max_sleep_between_retries_ms result_backend_transport_options "
        "result_cache_max result_chord_expires result_chord_join_timeout result_chord_retry_interval "
        "result_compression "
        "result_exchange result_exchange_type result_persistent result_serializer result_extended "
        "redis_backend_use_ssl redis_backend_health_check_interval redis_db redis_host "
        "redis_max_connections redis_password "
        "redis_port redis_retry_on_timeout redis_socket_connect_timeout redis_socket_keepalive redis_socket_timeout "
        "redis_username redis_backend_credential_provider redis_client_name "
        "database_create_tables_at_setup database_engine_callback database_engine_options "
        "database_short_lived_sessions "
        "database_table_names database_table_schemas database_url cache_backend cache_backend_options "
        "task_remote_tracebacks task_store_eager_result",
        maps("", "remove it: results are rows of your database"),
        SETTING,
    ),
    **each(
        "arangodb_backend_settings azureblockblob_base_path azureblockblob_connection_timeout "
        "azureblockblob_container_name "
        "azureblockblob_connection_string azureblockblob_read_timeout azureblockblob_retry_increment_base "
        "azureblockblob_retry_initial_backoff_sec azureblockblob_retry_max_attempts cassandra_auth_kwargs "
        "cassandra_auth_provider cassandra_bundle_path cassandra_entry_ttl cassandra_keyspace cassandra_options "
        "cassandra_port cassandra_read_consistency cassandra_servers cassandra_table cassandra_write_consistency "
        "cosmosdbsql_collection_name cosmosdbsql_consistency_level cosmosdbsql_database_name "
        "cosmosdbsql_max_retry_attempts cosmosdbsql_max_retry_wait_time couchbase_backend_settings "
        "elasticsearch_max_retries elasticsearch_retry_on_timeout elasticsearch_save_meta_as_text "
        "elasticsearch_timeout "
        "gcs_base_path gcs_bucket gcs_project gcs_ttl mongodb_backend_settings s3_access_key_id s3_base_path s3_bucket "
        "s3_endpoint_url s3_region s3_secret_access_key couchdb_backend_settings dynamodb_endpoint_url",
        lacks("results are rows of your database, and in no other store"),
        SETTING,
    ),
    **each(
        "result_expires result_failure_expires",
        but(
            "", 'write ASYNCQ["SUCCEEDED_RETENTION_SECONDS"] and ["FAILED_RETENTION_SECONDS"]: 7 and 30 days unless set'
        ),
        SETTING,
    ),
    "settings.beat_schedule": maps("", SCHEDULE),
    "settings.beat_schedule.*": but(
        "@task(schedule={schedule})  # {of}",
        f"{SCHEDULE}; its name, arguments and starts_at are options of cron() and every()",
        options=options(
            ("schedule", to("schedule", "{value:schedule}")),
            ("task", to("of", "{value}")),
            ("args kwargs", drops("args= and kwargs= of cron() or every()")),
            ("options", differs("", "", "options of the call belong to the task: queue_name, expires, priority")),
            ("relative", drops("remove it: intervals count from starts_at, or from the creation of the schedule")),
            (
                "enabled",
                differs("", "", "schedules are switched off in the admin, or by `manage.py asyncq schedules disable`"),
            ),
            ("tenant_schemas", has_none('a tenant is entered by a function of ASYNCQ["AROUND"]')),
        ),
    ),
    **each(
        "beat_cron_starting_deadline beat_enable_remote_control beat_max_loop_interval "
        "beat_remote_control_max_tick_age "
        "beat_schedule_filename beat_scheduler beat_sync_every",
        maps("", "remove it: schedules are rows, and one of the workers fires them"),
        SETTING,
    ),
    "settings.timezone": maps("", 'remove it: schedules are in TIME_ZONE, or cron(…, timezone="Europe/Berlin")'),
    "settings.enable_utc": maps("", "remove it: schedules need USE_TZ = True, Django's default"),
    **each(
        "imports include",
        but(
            "",
            "tasks are found in the tasks.py of each installed app, and in what those import: import other "
            "modules there",
        ),
        SETTING,
    ),
    **each(
        "accept_content task_serializer task_compression event_serializer",
        but(
            "",
            f"{OPTIONS['serializer']}; dates, Decimal, UUIDs and model instances travel with "
            'ASYNCQ["TYPED_ARGUMENTS"] = True',
            options=options(
                *((f"={each}", drops(OPTIONS["serializer"])) for each in ("'json'", "['json']", "('json',)"))
            ),
        ),
        SETTING,
    ),
    "settings.task_routes": maps("", ROUTE),
    "settings.task_routes.*": maps(
        "@task(queue_name={queue})",
        ROUTE,
        options=options(
            ("queue", to("queue", "{value}")),
            ("routing_key exchange exchange_type", has_none("exchanges do not exist: name the queue")),
            ("priority", differs("", "", "priority= of the task: higher comes first")),
            ("delivery_mode", drops(DROP)),
        ),
    ),
    "settings.task_queues": but("", 'write TASKS["default"]["QUEUES"]: names alone, without exchanges and keys'),
    **each(
        "task_default_queue",
        but("", 'the default is the queue "default": name another in @task(queue_name=…)'),
        SETTING,
    ),
    **each(
        "task_default_exchange task_default_exchange_type task_default_routing_key task_default_delivery_mode "
        "task_default_queue_type task_create_missing_queues task_create_missing_queue_type "
        "task_create_missing_queue_exchange_type task_protocol task_publish_retry task_publish_retry_policy "
        "control_exchange control_queue_durable control_queue_exclusive control_queue_expires control_queue_ttl "
        "event_exchange event_queue_durable event_queue_exclusive event_queue_expires event_queue_prefix "
        "event_queue_ttl "
        "worker_detect_quorum_queues queue_ha_policy",
        maps("", "remove it: there are no exchanges and no messages to configure"),
        SETTING,
    ),
    **each(
        "task_queue_max_priority task_default_priority task_inherit_parent_priority",
        but("", "every queue has priorities from −100 to 100, higher first; the default is 0, and none is inherited"),
        SETTING,
    ),
    "settings.task_annotations": lacks("options belong to the declaration of each task"),
    **each(
        "task_acks_late task_reject_on_worker_lost task_acks_on_failure_or_timeout task_acks_on_failure "
        "task_acks_on_timeout task_retry_on_worker_lost",
        maps(
            "",
            ALWAYS,
            options=options(
                ("=False", differs("", "", "a task whose worker dies runs again here: it must bear a second run"))
            ),
        ),
        SETTING,
    ),
    **each(
        "task_always_eager task_eager_propagates",
        but(
            "",
            "in tests use run_tasks() of django_asyncq.testing, or its mode immediate",
            options=options(("=False", drops(DROP))),
        ),
        SETTING,
    ),
    **each("task_ignore_result task_store_errors_even_if_ignored", maps("", KEPT), SETTING),
    "settings.task_time_limit": but(
        'ASYNCQ = {{"TIMEOUT_SECONDS": {value}}}',
        "a `def` task is asked to stop, and its process replaced if it does not",
    ),
    "settings.task_soft_time_limit": but(
        "", "write soft_timeout in each task that calls context.check(): there is none for all"
    ),
    "settings.task_default_rate_limit": lacks('write @task(rate="10/m") for each task: there is none for all'),
    **each(
        "task_track_started task_send_sent_event worker_send_task_events worker_enable_remote_control "
        "task_repr_maxlevels "
        "worker_state_db worker_direct",
        maps("", "remove it: the row says when a task was enqueued, began and finished"),
        SETTING,
    ),
    "settings.task_allow_error_cb_on_chord_header": maps("", "remove it"),
    "settings.task_publish_max_retries": maps("", ATTEMPTS),
    "settings.worker_concurrency": but(
        'ASYNCQ = {{"PROCESSES": {value}, "CONCURRENCY": 1}}',
        "one task in each of so many processes; threads are cheaper where the code allows them",
    ),
    "settings.worker_prefetch_multiplier": maps("", "remove it: a worker takes no more than it can begin"),
    "settings.worker_max_tasks_per_child": maps("", "write `manage.py runworkers --max-tasks N`"),
    "settings.worker_max_memory_per_child": but(
        "", "write `manage.py runworkers --max-memory-mb N`: megabytes, not kilobytes"
    ),
    **each(
        "worker_pool worker_pool_start_method",
        but(
            "",
            'processes with threads: --processes and --concurrency; ASYNCQ["START_METHOD"]. There is no '
            "gevent and no eventlet",
        ),
        SETTING,
    ),
    "settings.worker_autoscaler": lacks(
        "the scale of a queue says how many slots it wants: `manage.py asyncq queues scale NAME`"
    ),
    "settings.worker_lost_wait": maps("", "remove it"),
    "settings.worker_deduplicate_successful_tasks": maps(
        "", "remove it: a run that was recovered late cannot finish a task twice"
    ),
    "settings.worker_disable_rate_limits": but("", "a rate belongs to its task: leave out rate="),
    **each(
        "worker_soft_shutdown_timeout worker_enable_soft_shutdown_on_idle",
        but("", 'write ASYNCQ["SHUTDOWN_GRACE_SECONDS"]'),
        SETTING,
    ),
    **each(
        "worker_cancel_long_running_tasks_on_connection_loss worker_proc_alive_timeout worker_agent "
        "worker_consumer worker_timer "
        "worker_timer_precision worker_pool_putlocks worker_pool_restarts worker_disable_prefetch "
        "worker_eta_task_limit "
        "worker_enable_prefetch_count_reduction",
        maps("", DROP),
        SETTING,
    ),
    **each(
        "worker_hijack_root_logger worker_log_color worker_log_format worker_log_datefmt worker_task_log_format "
        "worker_task_log_datefmt worker_redirect_stdouts worker_redirect_stdouts_level",
        maps("", "remove it: Django's LOGGING holds for the workers too"),
        SETTING,
    ),
    **each(
        "security_certificate security_cert_store security_key security_key_password security_digest",
        lacks("messages are not signed: who can write to Redis can run declared tasks, and nothing else"),
        SETTING,
    ),
    **each("tasks cache_results app conf loader skip_checks result_backend_thread_safe class", maps("", DROP), SETTING),
    # of an app's `conf` itself
    "settings.update": maps("", "the settings are those of Django", takes="settings"),
    **each(
        "get setdefault keys items values humanize table with_defaults changes find_option "
        "find_value_for_key without_defaults "
        "namespace defaults prefix",
        maps("", "read ASYNCQ in Django's settings"),
        SETTING,
    ),
}

# Settings whose names before Celery 4 do not follow from the new ones.
IRREGULAR = {
    "always_eager": "task_always_eager",
    "eager_propagates_exceptions": "task_eager_propagates",
    "task_result_expires": "result_expires",
    "max_cached_results": "result_cache_max",
    "result_dburi": "database_url",
    "result_engine_options": "database_engine_options",
    "result_db_tablenames": "database_table_names",
    "result_db_short_lived_sessions": "database_short_lived_sessions",
    "message_compression": "task_compression",
    "send_task_sent_event": "task_send_sent_event",
    "send_events": "worker_send_task_events",
    "task_publish_retry": "task_publish_retry",
    "send_task_error_emails": "app",
    "task_error_emails": "app",
}
NAME = re.compile(r"(?P<prefix>CELERY_BEAT|CELERYBEAT|CELERYD|CELERY|BROKER)_(?P<rest>[A-Z0-9_]*[A-Z0-9])")


def setting_name(name: str) -> str:
    """Return the name of a setting as Celery's documents have it, in whatever form Django's settings do; or ""."""
    found = NAME.fullmatch(name)
    if not found:
        return ""
    prefix, rest = found["prefix"], found["rest"].lower()
    known = {each.removeprefix(SETTING) for each in USES_OF_SETTINGS}
    if prefix == "BROKER":
        return f"broker_{rest}" if f"broker_{rest}" in known else ""
    places = {
        "CELERYD": (f"worker_{rest}", rest, f"task_{rest}", f"worker_{rest.removeprefix('worker_')}"),
        "CELERYBEAT": (f"beat_{rest}",),
        "CELERY_BEAT": (f"beat_{rest}",),
        "CELERY": (rest, f"task_{rest}", f"worker_{rest}", f"result_{rest}"),
    }[prefix]
    for candidate in (*places, IRREGULAR.get(rest, "")):
        if candidate in known:
            return candidate
    return places[0]

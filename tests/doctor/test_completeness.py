"""The tables know every public name, setting and option of the versions that were read on 2026-11-30.

celery 5.7.0, rq 3.0.0 with django-rq 4.2.0 and rq-scheduler 0.14.0, huey 3.5.4, dramatiq 2.2.1, django-q2 1.11.1.
"""

from __future__ import annotations

import pytest

from .projects import VOCABULARIES

# What a name begins with in the tables → the names.
NAMES: dict[str, dict[str, str]] = {
    "celery": {
        "settings.": (
            "accept_content arangodb_backend_settings azureblockblob_base_path "
            "azureblockblob_connection_timeout azureblockblob_container_name azureblockblob_read_timeout "
            "azureblockblob_retry_increment_base azureblockblob_retry_initial_backoff_sec "
            "azureblockblob_retry_max_attempts beat_cron_starting_deadline beat_enable_remote_control "
            "beat_max_loop_interval beat_remote_control_max_tick_age beat_schedule beat_schedule_filename "
            "beat_scheduler beat_sync_every broker_channel_error_retry broker_connection_max_retries "
            "broker_connection_retry broker_connection_retry_on_startup broker_connection_timeout "
            "broker_failover_strategy broker_heartbeat broker_heartbeat_checkrate broker_host "
            "broker_login_method broker_native_delayed_delivery_queue_type broker_password "
            "broker_pool_acquire_timeout broker_pool_limit broker_port broker_read_url broker_transport "
            "broker_transport_options broker_url broker_use_ssl broker_user broker_vhost broker_write_url "
            "cache_backend cache_backend_options cassandra_auth_kwargs cassandra_auth_provider "
            "cassandra_bundle_path cassandra_entry_ttl cassandra_keyspace cassandra_options cassandra_port "
            "cassandra_read_consistency cassandra_servers cassandra_table cassandra_write_consistency "
            "control_exchange control_queue_durable control_queue_exclusive control_queue_expires "
            "control_queue_ttl cosmosdbsql_collection_name cosmosdbsql_consistency_level "
            "cosmosdbsql_database_name cosmosdbsql_max_retry_attempts cosmosdbsql_max_retry_wait_time "
            "couchbase_backend_settings database_create_tables_at_setup database_engine_callback "
            "database_engine_options database_short_lived_sessions database_table_names "
            "database_table_schemas database_url elasticsearch_max_retries elasticsearch_retry_on_timeout "
            "elasticsearch_save_meta_as_text elasticsearch_timeout enable_utc event_exchange "
            "event_queue_durable event_queue_exclusive event_queue_expires event_queue_prefix event_queue_ttl "
            "event_serializer gcs_base_path gcs_bucket gcs_project gcs_ttl imports include "
            "mongodb_backend_settings redis_backend_use_ssl redis_db redis_host redis_max_connections "
            "redis_password redis_port redis_retry_on_timeout redis_socket_connect_timeout "
            "redis_socket_keepalive redis_socket_timeout redis_username result_accept_content result_backend "
            "result_backend_always_retry result_backend_base_sleep_between_retries_ms "
            "result_backend_max_retries result_backend_max_sleep_between_retries_ms "
            "result_backend_transport_options result_cache_max result_chord_expires result_chord_join_timeout "
            "result_chord_retry_interval result_compression result_exchange result_exchange_type "
            "result_expires result_extended result_failure_expires result_persistent result_serializer "
            "s3_access_key_id s3_base_path s3_bucket s3_endpoint_url s3_region s3_secret_access_key "
            "security_cert_store security_certificate security_digest security_key security_key_password "
            "task_acks_late task_acks_on_failure task_acks_on_failure_or_timeout task_acks_on_timeout "
            "task_allow_error_cb_on_chord_header task_always_eager task_annotations task_compression "
            "task_create_missing_queue_exchange_type task_create_missing_queue_type "
            "task_create_missing_queues task_default_delivery_mode task_default_exchange "
            "task_default_exchange_type task_default_priority task_default_queue task_default_queue_type "
            "task_default_rate_limit task_default_routing_key task_eager_propagates task_ignore_result "
            "task_inherit_parent_priority task_protocol task_publish_retry task_publish_retry_policy "
            "task_queue_max_priority task_queues task_reject_on_worker_lost task_remote_tracebacks "
            "task_repr_maxlevels task_retry_on_worker_lost task_routes task_send_sent_event task_serializer "
            "task_soft_time_limit task_store_eager_result task_store_errors_even_if_ignored task_time_limit "
            "task_track_started timezone worker_agent worker_autoscaler "
            "worker_cancel_long_running_tasks_on_connection_loss worker_concurrency worker_consumer "
            "worker_deduplicate_successful_tasks worker_detect_quorum_queues worker_direct "
            "worker_disable_prefetch worker_disable_rate_limits worker_enable_prefetch_count_reduction "
            "worker_enable_remote_control worker_enable_soft_shutdown_on_idle worker_eta_task_limit "
            "worker_hijack_root_logger worker_log_color worker_log_datefmt worker_log_format worker_lost_wait "
            "worker_max_memory_per_child worker_max_tasks_per_child worker_pool worker_pool_putlocks "
            "worker_pool_restarts worker_pool_start_method worker_prefetch_multiplier "
            "worker_proc_alive_timeout worker_redirect_stdouts worker_redirect_stdouts_level "
            "worker_send_task_events worker_soft_shutdown_timeout worker_state_db worker_task_log_datefmt "
            "worker_task_log_format worker_timer worker_timer_precision"
        ),
        "celery.signals.": (
            "before_task_publish after_task_publish task_internal_error task_prerun task_postrun task_success "
            "task_received task_rejected task_unknown task_retry task_failure task_revoked celeryd_init "
            "celeryd_after_setup worker_init worker_before_create_process worker_process_init "
            "worker_process_shutdown worker_ready worker_shutdown worker_shutting_down setup_logging "
            "after_setup_logger after_setup_task_logger beat_init beat_embedded_init heartbeat_sent "
            "eventlet_pool_started eventlet_pool_preshutdown eventlet_pool_postshutdown eventlet_pool_apply"
        ),
        "Task.": (
            "AsyncResult after_return apply apply_async before_start chunks delay delay_on_commit map name "
            "on_failure on_retry on_success replace request retry run s si signature starmap subtask throws "
            "update_state"
        ),
        "Task.request.": (
            "args callbacks called_directly chain children chord correlation_id delivery_info errbacks eta "
            "expires get group headers hostname id ignore_result is_eager kwargs logfile loglevel origin "
            "parent_id properties reply_to retries root_id shadow stamps taskset timelimit utc"
        ),
        "App.": (
            "add_periodic_task amqp autodiscover_tasks backend close config_from_object connection "
            "connection_for_read connection_for_write control current_task events finalize log now "
            "on_after_configure on_after_finalize pool producer_pool register_task send_task set_current "
            "set_default signature start steps tasks timezone user_options worker_main"
        ),
        "App.control.": (
            "Mailbox add_consumer autoscale broadcast cancel_consumer disable_events discard_all election "
            "enable_events heartbeat inspect ping pool_grow pool_restart pool_shrink purge rate_limit revoke "
            "revoke_by_stamped_headers shutdown terminate time_limit"
        ),
        "Inspect.": (
            "active active_queues clock conf hello memdump memsample objgraph ping query_task registered "
            "registered_tasks report reserved revoked scheduled stats"
        ),
        "AsyncResult.": (
            "as_list as_tuple backend build_graph children collect date_done exists failed forget get "
            "get_leaf graph id ignored info iterdeps maybe_reraise maybe_throw name queue ready result revoke "
            "state status successful task_id then throw traceback wait worker"
        ),
        "Signature.": (
            "apply apply_async args clone delay freeze id immutable kwargs link link_error name on_error "
            "options set stamp task"
        ),
        "celery.": (
            "chain chord chunks current_task group maybe_signature shared_task signature uuid xmap xstarmap "
            "Celery Signature Task"
        ),
        "celery.exceptions.": (
            "CeleryWarning AlwaysEagerIgnored DuplicateNodenameWarning DuplicateTaskNameWarning FixupWarning "
            "NotConfigured SecurityWarning CeleryError ImproperlyConfigured SecurityError OperationalError "
            "TaskPredicate Ignore Reject Retry TaskError QueueNotFound IncompleteStream NotRegistered "
            "AlreadyRegistered TimeoutError MaxRetriesExceededError TaskRevokedError InvalidTaskError "
            "ChordError BackendError BackendGetMetaError BackendStoreError SoftTimeLimitExceeded "
            "TimeLimitExceeded WorkerLostError Terminated CPendingDeprecationWarning CDeprecationWarning "
            "WorkerShutdown WorkerTerminate CeleryCommandException"
        ),
    },
    "rq": {
        "Queue.": (
            "all count delete empty enqueue enqueue_at enqueue_call enqueue_in enqueue_job enqueue_many "
            "fetch_job get_job_ids get_jobs is_async is_empty job_ids jobs key name remove "
            "failed_job_registry finished_job_registry started_job_registry scheduled_job_registry "
            "deferred_job_registry canceled_job_registry prepare_data create_job"
        ),
        "Job.": (
            "args cancel cleanup delete exc_info func func_name get_id get_meta get_position get_status id "
            "is_canceled is_deferred is_failed is_finished is_queued is_scheduled is_started is_stopped "
            "kwargs latest_result meta perform refresh requeue results return_value save save_meta"
        ),
        "rq.": (
            "Callback Retry cancel_job get_current_job requeue_job Queue RateLimit SimpleWorker SpawnWorker "
            "Worker Repeat Webhook"
        ),
        "django_rq.": ("enqueue get_connection get_queue get_scheduler get_worker job"),
        "Scheduler.": (
            "cancel change_execution_time count cron enqueue_at enqueue_in enqueue_job get_jobs run schedule"
        ),
    },
    "huey": {
        "Huey.": (
            "add_schedule all_results build_error_result context_task create_consumer delete dequeue "
            "disconnect_signal enqueue execute flush flush_locks get get_raw get_storage immediate is_locked "
            "is_revoked lock_task notify_interrupted_tasks on_shutdown on_startup pending pending_count "
            "periodic_task post_execute pre_execute put put_if_empty put_result rate_limit read_periodic "
            "read_schedule ready_to_run restore restore_all restore_by_id result result_count revoke "
            "revoke_all revoke_by_id scheduled scheduled_count signal storage_class task "
            "unregister_on_shutdown unregister_on_startup unregister_post_execute unregister_pre_execute"
        ),
        "Task.": (
            "call_local create_task is_revoked map restore retries retry_delay revoke s schedule task_base unregister"
        ),
        "Result.": ("get get_raw_result id is_ready is_revoked reschedule reset restore revoke"),
        "djhuey.": (
            "db_periodic_task db_task enqueue is_revoked lock_task on_commit_task on_shutdown on_startup "
            "periodic_task post_execute pre_execute restore restore_all restore_by_id result revoke "
            "revoke_all revoke_by_id scheduled signal task"
        ),
        "huey.exceptions.": (
            "CancelExecution ConfigurationError HueyException RateLimitExceeded ResultTimeout RetryTask "
            "TaskException TaskLockedException TaskTimeout"
        ),
        "huey.signals.": (
            "SIGNAL_CANCELED SIGNAL_COMPLETE SIGNAL_ENQUEUED SIGNAL_ERROR SIGNAL_EXECUTING SIGNAL_EXPIRED "
            "SIGNAL_INTERRUPTED SIGNAL_LOCKED SIGNAL_RATE_LIMITED SIGNAL_RETRYING SIGNAL_REVOKED "
            "SIGNAL_SCHEDULED SIGNAL_TIMEOUT"
        ),
        "huey.": ("RedisHuey SqliteHuey MemoryHuey FileHuey CancelExecution RetryTask chord crontab group"),
    },
    "dramatiq": {
        "dramatiq.": (
            "Actor GenericActor actor Broker get_broker set_broker group pipeline Encoder JSONEncoder "
            "PickleEncoder DramatiqError BrokerError DecodeError ActorNotFound QueueNotFound QueueJoinTimeout "
            "BrokerConnectionError ConnectionClosed ConnectionFailed RateLimitExceeded Retry get_logger "
            "Message get_encoder set_encoder Middleware Worker"
        ),
        "Task.": ("message message_with_options send send_with_options"),
        "class dramatiq.Middleware.": (
            "actor_options after_ack after_consumer_thread_boot after_declare_actor after_declare_delay_queue "
            "after_declare_queue after_enqueue after_nack after_process_boot after_process_message "
            "after_skip_message after_worker_boot after_worker_shutdown after_worker_thread_boot before_ack "
            "before_consumer_thread_shutdown before_declare_actor before_declare_queue before_delay_message "
            "before_enqueue before_nack before_process_message before_worker_boot before_worker_shutdown "
            "before_worker_thread_shutdown forks"
        ),
        "Broker.": (
            "add_middleware close consume declare_actor declare_queue enqueue flush flush_all get_actor "
            "get_declared_actors get_declared_queues join"
        ),
        "Signature.": ("add_completion_callback completed completed_count get_result get_results run wait"),
    },
    "q2": {
        "django_q.tasks.": (
            "async_chain async_iter async_task AsyncTask Chain Iter count_group delete_group fetch "
            "fetch_cached fetch_group queue_size result result_cached result_group schedule"
        ),
        "settings.Q_CLUSTER.": (
            "ack_failures broker_class bulk cache cached catch_up cluster_name compress cpu_affinity "
            "daemonize_workers django_redis error_reporter guard_cycle iron_mq label log_level max_attempts "
            "max_rss mongo mongo_db name orm poll queue_limit recycle redis retry save_limit save_limit_per "
            "scheduler sqs sync testing time_zone timeout workers"
        ),
        "django_q.signals.": ("pre_enqueue pre_execute post_execute post_execute_in_worker post_spawn"),
        "django_q.models.": ("Schedule Task Success Failure OrmQ"),
    },
}
# An entry of the tables → the options of the call.
OPTIONS: dict[str, dict[str, str]] = {
    "celery": {
        "celery.shared_task": (
            "acks_late autoretry_for base bind default_retry_delay dont_autoretry_for expires ignore_result "
            "max_retries name priority queue rate_limit reject_on_worker_lost retry_backoff retry_backoff_max "
            "retry_jitter retry_kwargs serializer soft_time_limit store_errors_even_if_ignored throws "
            "time_limit track_started typing"
        ),
        "Task.apply_async": (
            "args kwargs countdown eta expires queue exchange routing_key priority headers link link_error "
            "task_id time_limit soft_time_limit serializer compression retry retry_policy ignore_result "
            "shadow producer connection"
        ),
        "Task.retry": ("args kwargs exc throw eta countdown max_retries"),
    },
    "rq": {
        "rq.job": (
            "queue connection timeout result_ttl ttl queue_class depends_on at_front meta description "
            "failure_ttl retry on_failure on_success on_stopped webhooks"
        ),
        "Queue.enqueue": (
            "timeout result_ttl ttl failure_ttl description depends_on job_id at_front meta retry repeat "
            "on_success on_failure on_stopped rate_limit pipeline unique webhooks"
        ),
    },
    "huey": {
        "Huey.task": ("retries retry_delay retry_backoff priority context name expires timeout"),
        "Task.schedule": ("args kwargs eta delay priority retries retry_delay retry_backoff expires timeout id"),
    },
    "dramatiq": {
        "dramatiq.actor": (
            "actor_name queue_name priority broker actor_class max_age max_backoff max_retries min_backoff "
            "notify_shutdown on_failure on_retry_exhausted on_success pipe_ignore pipe_target retry_when "
            "throws time_limit"
        ),
    },
    "q2": {
        "django_q.tasks.async_task": (
            "hook group save sync cached ack_failure iter_count iter_cached chain broker cluster timeout "
            "q_options task_name"
        ),
        "django_q.tasks.schedule": (
            "name hook schedule_type minutes repeats next_run cron cluster intended_date_kwarg"
        ),
    },
}


@pytest.mark.parametrize("queue", NAMES)
def test_every_name_is_known(queue: str) -> None:
    """By itself, by another name, or as the kind of value that it is."""
    vocabulary = VOCABULARIES[queue]
    unknown = []
    for prefix, words in NAMES[queue].items():
        for word in words.split():
            path = f"{prefix}{word}"
            if vocabulary.use_of(path)[1] is None and not vocabulary.has_more(vocabulary.canonical(path)):
                unknown.append(path)
    assert unknown == []


@pytest.mark.parametrize("queue", OPTIONS)
def test_every_option_is_known(queue: str) -> None:
    """The options of what declares and of what enqueues."""
    vocabulary = VOCABULARIES[queue]
    for path, words in OPTIONS[queue].items():
        assert set(words.split()) - {each.partition("=")[0] for each in vocabulary.uses[path].options} == set(), path

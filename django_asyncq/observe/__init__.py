"""What people and programs ask about tasks and the fleet: the inspector, waits for results, health, problems.

| module                                            | what it does                                                |
|---------------------------------------------------|-------------------------------------------------------------|
| `inspector`, `values`                             | the public `Inspector`, and what it returns                 |
| `of_tasks`, `of_queues`, `of_schedules`, `counts` | its parts                                                   |
| `of_workflows`                                    | another one: workflows, their graphs, their retry           |
| `known_names`, `still_running`                    | names that something has; what still runs after a control   |
| `soundness`, `problems`, `alerts`                 | what is wrong with the fleet, and the messages about it     |
| `health`, `numbers`, `scale`, `access`            | what monitors and autoscalers read                          |
| `waits`, `waiters`, `reader`                      | waits for results, for programs and for pages               |
"""

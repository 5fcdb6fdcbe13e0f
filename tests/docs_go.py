"""Go programs around the examples of the docs: file by file, with BLOCK for the example.

The clients in them print their calls, because no module can be fetched in a test. Their signatures are the real ones.
"""

from __future__ import annotations

GO_MODULE = """module shop
go 1.18
require NAME v0.0.0
replace NAME => ./client
"""
# Signatures: asynq, client.go at commit 0275df8.
ASYNQ = {
    "go.mod": GO_MODULE.replace("NAME", "github.com/hibiken/asynq"),
    "client/go.mod": "module github.com/hibiken/asynq\ngo 1.18\n",
    "client/client.go": """package asynq
type Task struct { typename string; payload []byte }
type TaskInfo struct{}
type Option interface { String() string }
type option string
func (o option) String() string { return string(o) }
func Queue(name string) Option { return option("queue " + name) }
func Group(name string) Option { return option("group " + name) }
func NewTask(typename string, payload []byte, opts ...Option) *Task { return &Task{typename, payload} }
type Client struct { Calls [][]string }
func (c *Client) Enqueue(task *Task, opts ...Option) (*TaskInfo, error) {
	call := []string{task.typename, string(task.payload)}
	for _, each := range opts { call = append(call, each.String()) }
	c.Calls = append(c.Calls, call)
	return &TaskInfo{}, nil
}
""",
    "main.go": """package main
import ("encoding/json"; "os"; "github.com/hibiken/asynq")
func main() {
	client, payload := &asynq.Client{}, []byte("payload")
	BLOCK
	json.NewEncoder(os.Stdout).Encode(client.Calls)
}
""",
}
# Signatures: go-redis v9, list_commands.go.
INBOX = {
    "go.mod": GO_MODULE.replace("NAME v0.0.0", "NAME v9.0.0").replace("NAME", "github.com/redis/go-redis/v9"),
    "client/go.mod": "module github.com/redis/go-redis/v9\ngo 1.18\n",
    "client/client.go": """package redis
import ("context"; "encoding/json"; "os")
type IntCmd struct{}
func (c *IntCmd) Err() error { return nil }
type Client struct{}
func (c *Client) LPush(ctx context.Context, key string, values ...interface{}) *IntCmd {
	json.NewEncoder(os.Stdout).Encode([]string{key, string(values[0].([]byte))})
	return &IntCmd{}
}
""",
    "main.go": """package main
import ("context"; "encoding/json"; "github.com/redis/go-redis/v9")
func push(ctx context.Context, client *redis.Client) error {
	BLOCK
}
func main() { if err := push(context.Background(), &redis.Client{}); err != nil { panic(err) } }
""",
}

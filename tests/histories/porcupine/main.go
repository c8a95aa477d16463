// Judge histories with Porcupine: is each partition, and each offset that a group committed, linearizable?
//
// Standard input has a JSON object a line, as tests/histories/outside.py writes them. Standard output has a verdict for
// each: "Ok", "Illegal", or "Unknown" if the search took longer than its time.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

const searchTime = 120 * time.Second

// Op is an operation: append or read of a partition, write or get of a committed offset. An operation that may take
// effect at any later time has the largest possible return time.
type Op struct {
	Kind   string   `json:"kind"`
	Client int      `json:"client"`
	Call   int64    `json:"call"`
	Return int64    `json:"return"`
	Offset int64    `json:"offset"`
	Values []string `json:"values"`
}

// Object is a partition or a committed offset, with its operations.
type Object struct {
	Name string `json:"name"`
	Kind string `json:"kind"`
	Ops  []Op   `json:"ops"`
}

// Verdict is the result for an object. Done is the length of the longest sequence of operations that is possible.
type Verdict struct {
	Name   string `json:"name"`
	Result string `json:"result"`
	Ops    int    `json:"ops"`
	Done   int    `json:"done"`
}

// A partition's state is its next offset. Appended values are compared through the offsets that they got: a second value
// at an offset cannot be appended, because the next offset is larger then.
func partition(ops []Op) porcupine.Model {
	appended := map[int64]string{}
	for _, op := range ops {
		if op.Kind == "append" {
			appended[op.Offset] = op.Values[0]
		}
	}
	return porcupine.Model{
		Init: func() interface{} { return int64(0) },
		Step: func(state, input, output interface{}) (bool, interface{}) {
			next, op := state.(int64), input.(Op)
			switch op.Kind {
			case "append":
				return op.Offset == next, next + 1
			case "end":
				return op.Offset == next, next
			}
			for row, value := range op.Values {
				at := op.Offset + int64(row)
				if at >= next || appended[at] != value {
					return false, next
				}
			}
			return true, next
		},
	}
}

// A committed offset is a register.
var register = porcupine.Model{
	Init: func() interface{} { return int64(0) },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		op := input.(Op)
		if op.Kind == "write" {
			return true, op.Offset
		}
		return op.Offset == state.(int64), state
	},
}

func judge(object Object) Verdict {
	model := register
	if object.Kind == "partition" {
		model = partition(object.Ops)
	}
	operations := make([]porcupine.Operation, len(object.Ops))
	for at, op := range object.Ops {
		operations[at] = porcupine.Operation{ClientId: op.Client, Input: op, Call: op.Call, Return: op.Return}
	}
	done, result := 0, porcupine.CheckOperationsTimeout(model, operations, searchTime)
	if result == porcupine.Ok {
		return Verdict{object.Name, string(result), len(operations), len(operations)}
	}
	_, info := porcupine.CheckOperationsVerbose(model, operations, searchTime)
	for _, sequences := range info.PartialLinearizations() {
		for _, sequence := range sequences {
			done = max(done, len(sequence))
		}
	}
	return Verdict{object.Name, string(result), len(operations), done}
}

func main() {
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	decoder, encoder := json.NewDecoder(lines), json.NewEncoder(os.Stdout)
	for decoder.More() {
		var object Object
		if err := decoder.Decode(&object); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		if err := encoder.Encode(judge(object)); err != nil {
			os.Exit(2)
		}
	}
}

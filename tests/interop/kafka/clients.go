// Drives the three clients in Go, built inside a module that requires them. See README.md.
package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
)

const (
	timeMs    = int64(1_700_000_000_000)
	retention = "7200000"
)

type header struct {
	name  string
	value []byte
}

// A driver of one client.
type peer interface {
	write(topic, codec string, count int)
	transact(topic string, count int)
	read(topics []string, group string, count int)
	member(topic, group, instance string, ended <-chan struct{})
	admin(topic string)
}

func value(number int) []byte {
	if number%50 == 49 {
		return bytes.Repeat([]byte("x"), 100_000)
	}
	all := make([]byte, 256)
	for at := range all {
		all[at] = byte(at)
	}
	return [][]byte{nil, {}, bytes.Repeat(fmt.Appendf(nil, "v%d", number), 20), all}[number%4]
}

func key(number int) []byte { return fmt.Appendf(nil, "k%d", number) }

func headers(number int) []header {
	return []header{{"h", []byte("1")}, {"h", []byte{}}, {fmt.Sprintf("n%d", number), []byte{0}}}
}

// Until there is a line on the standard input.
func pause() {
	_, _ = os.Stdin.Read(make([]byte, 1))
}

var printing sync.Mutex

func say(words ...any) {
	line, err := json.Marshal(words)
	must(err)
	printing.Lock()
	defer printing.Unlock()
	fmt.Println(string(line))
}

func text(data []byte) any {
	if data == nil {
		return nil
	}
	return hex.EncodeToString(data)
}

func sayRecord(topic string, partition int32, offset int64, key, value []byte, headers []header, atMs int64) {
	found := [][]any{}
	for _, one := range headers {
		found = append(found, []any{one.name, text(one.value)})
	}
	say("record", topic, partition, offset, text(key), text(value), found, atMs)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func number(word string) int {
	found, err := strconv.Atoi(word)
	must(err)
	return found
}

func main() {
	client, verb, address, words := os.Args[1], os.Args[2], os.Args[3], os.Args[4:]
	var driven peer
	switch client {
	case "franz-go":
		driven = franz{address}
	case "sarama", "sarama-max":
		driven = ibm{address, client == "sarama-max"}
	case "kafka-go":
		driven = segment{address}
	}
	switch verb {
	case "write":
		for _, codec := range strings.Split(words[1], ",") {
			driven.write(words[0]+"."+codec, codec, number(words[2]))
		}
	case "transact":
		driven.transact(words[0], number(words[2]))
	case "read":
		driven.read(strings.Split(words[0], ","), words[1], number(words[2]))
	case "member":
		ended := make(chan struct{})
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			close(ended)
		}()
		driven.member(words[0], words[1], words[2], ended)
	case "admin":
		driven.admin(words[0])
	}
}

package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type franz struct{ address string }

func (peer franz) client(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(peer.address))...)
	must(err)
	return client
}

func (peer franz) write(topic, codec string, count int) {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	client := peer.client(kgo.AllowAutoTopicCreation(), kgo.ProducerBatchCompression(codecs[codec]), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer client.Close()
	records := []*kgo.Record{}
	for number := range count {
		record := &kgo.Record{Topic: topic, Key: key(number), Value: value(number), Timestamp: time.UnixMilli(timeMs + int64(number))}
		for _, one := range headers(number) {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: one.name, Value: one.value})
		}
		records = append(records, record)
	}
	must(client.ProduceSync(context.Background(), records...).FirstErr())
}

// The position is moved by what it offers for reading and writing in one; without a member there is none to move. An end that fails with the
// connection is not sent again by the client: its application aborts, and looks whether the commit had been carried out.
func (peer franz) transact(topic string, count int) {
	client := peer.client(kgo.AllowAutoTopicCreation(), kgo.TransactionalID("franz-"+topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer client.Close()
	ctx := context.Background()
	for number := 0; number < count; number++ {
		must(client.BeginTransaction())
		for partition := range int32(3) {
			record := &kgo.Record{Topic: topic, Partition: partition, Value: fmt.Appendf(nil, "%d", number)}
			must(client.ProduceSync(ctx, record).FirstErr())
		}
		commits := number%3 != 2
		err := client.EndTransaction(ctx, kgo.TransactionEndTry(commits))
		isKnown := err == nil
		for tries := 0; err != nil && tries < 20; tries++ {
			time.Sleep(500 * time.Millisecond)
			err = client.EndTransaction(ctx, kgo.TryAbort)
		}
		must(err)
		if commits && !isKnown && peer.last(topic) != number {
			number--
		}
	}
}

func (peer franz) last(topic string) int {
	admin, ctx := kadm.NewClient(peer.client()), context.Background()
	defer admin.Close()
	ends, err := admin.ListEndOffsets(ctx, topic)
	must(err)
	end, _ := ends.Lookup(topic, 0)
	if end.Offset == 0 {
		return -1
	}
	from := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(end.Offset - 1)}}
	client := peer.client(kgo.ConsumePartitions(from))
	defer client.Close()
	number, err := strconv.Atoi(string(client.PollFetches(ctx).Records()[0].Value))
	must(err)
	return number
}

func (franz) say(record *kgo.Record) {
	found := []header{}
	for _, one := range record.Headers {
		found = append(found, header{one.Key, one.Value})
	}
	sayRecord(record.Topic, record.Partition, record.Offset, record.Key, record.Value, found, record.Timestamp.UnixMilli())
}

func (peer franz) read(topics []string, group string, count int) {
	client := peer.client(kgo.ConsumerGroup(group), kgo.ConsumeTopics(topics...), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	defer client.Close()
	for count > 0 {
		client.PollFetches(context.Background()).EachRecord(func(record *kgo.Record) {
			peer.say(record)
			count--
		})
	}
	must(client.CommitUncommittedOffsets(context.Background()))
}

func (peer franz) member(topic, group, instance string, ended <-chan struct{}) {
	held := []int32{}
	shown := func(_ context.Context, _ *kgo.Client, added map[string][]int32) {
		held = append(held, added[topic]...)
		slices.Sort(held)
		say("assigned", held)
	}
	gone := func(_ context.Context, _ *kgo.Client, lost map[string][]int32) {
		held = slices.DeleteFunc(held, func(one int32) bool { return slices.Contains(lost[topic], one) })
		say("assigned", held)
	}
	options := []kgo.Opt{
		kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic), kgo.SessionTimeout(10 * time.Second), kgo.DisableAutoCommit(),
		kgo.OnPartitionsAssigned(shown), kgo.OnPartitionsRevoked(gone), kgo.OnPartitionsLost(gone),
	}
	if instance != "" {
		options = append(options, kgo.InstanceID(instance))
	}
	client := peer.client(options...)
	defer client.Close()
	for {
		polling, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		fetches := client.PollFetches(polling)
		cancel()
		fetches.EachRecord(peer.say)
		if !fetches.Empty() {
			_ = client.CommitUncommittedOffsets(context.Background())
		}
		select {
		case <-ended:
			return
		default:
		}
	}
}

func (peer franz) admin(topic string) {
	// what it remembers of topics would be shown for seconds
	admin, kept, ctx := kadm.NewClient(peer.client(kgo.MetadataMinAge(10*time.Millisecond))), retention, context.Background()
	defer admin.Close()
	size := func() int {
		found, err := admin.ListTopics(ctx, topic)
		must(err)
		return len(found[topic].Partitions)
	}
	_, err := admin.CreateTopic(ctx, 3, 1, map[string]*string{"retention.ms": &kept}, topic)
	must(err)
	configs, err := admin.DescribeTopicConfigs(ctx, topic)
	must(err)
	for _, config := range configs[0].Configs {
		if config.Key == "retention.ms" {
			say("created", size(), config.MaybeValue())
		}
	}
	grown, err := admin.UpdatePartitions(ctx, 5, topic)
	must(err)
	must(grown.Error())
	say("grown", size())
	pause()
	found, err := admin.ListTopics(ctx)
	must(err)
	say("listed", found.Has(topic))
	_, err = admin.DeleteTopic(ctx, topic)
	must(err)
	time.Sleep(100 * time.Millisecond)
	found, err = admin.ListTopics(ctx)
	must(err)
	say("deleted", !found.Has(topic))
}

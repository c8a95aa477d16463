// usage: iggy-peer HOST:PORT ACTION STREAM...; one line of JSON per stream, and "done" at the end.

use futures_util::StreamExt;
use iggy::prelude::*;
use std::error::Error;
use std::time::Duration;
use tokio::io::AsyncReadExt;

const COUNT: u64 = 10_000;
const BATCH: u64 = 1_000;
const TOPIC: &str = "paid";

type Outcome = Result<String, Box<dyn Error>>;

fn payload(stream: &str, number: u64) -> String {
    format!("{stream} {number} {}", "é".repeat((number % 50) as usize))
}

fn id(name: &str) -> Identifier {
    Identifier::named(name).expect("a name")
}

async fn create(client: &IggyClient, stream: &str, partitions: u32) -> Result<(), IggyError> {
    client.create_stream(stream, &StreamCreateOptions::default()).await?;
    let options = TopicCreateOptions { partitions_count: Some(partitions), ..Default::default() };
    client.create_topic(&id(stream), TOPIC, &options).await?;
    Ok(())
}

async fn write(client: &IggyClient, stream: &str) -> Outcome {
    create(client, stream, 3).await?;
    for start in (0..COUNT).step_by(BATCH as usize) {
        let mut messages = Vec::new();
        for number in start..start + BATCH {
            messages.push(IggyMessage::builder().payload(payload(stream, number).into()).build()?);
        }
        client.send_messages(&id(stream), &id(TOPIC), &Partitioning::partition_id(0), &mut messages).await?;
    }
    let found = client.get_stream(&id(stream)).await?.ok_or("no stream")?;
    Ok(format!(r#""topic": "paid", "messages": {}, "topics": {}"#, found.messages_count, found.topics_count))
}

async fn poll(client: &IggyClient, stream: &str, strategy: PollingStrategy, options: PollOptions) -> Result<PolledMessages, IggyError> {
    let consumer = Consumer::new(Identifier::numeric(9).expect("a number"));
    client.poll_messages(&id(stream), &id(TOPIC), 0, &consumer, &strategy, options).await
}

async fn read(client: &IggyClient, stream: &str) -> Outcome {
    let mut number = 0;
    while number < COUNT {
        let options = PollOptions { count: BATCH as u32, ..Default::default() };
        let polled = poll(client, stream, PollingStrategy::offset(number), options).await?;
        assert!(!polled.messages.is_empty(), "nothing at offset {number}");
        for message in polled.messages {
            assert_eq!(message.header.offset, number);
            assert_eq!(message.payload, payload(stream, number));
            number += 1;
        }
    }
    Ok(format!(r#""read": {number}"#))
}

async fn commit(client: &IggyClient, stream: &str) -> Outcome {
    let mut nexts = Vec::new();
    for _ in 0..3 {
        let options = PollOptions { count: 7, commit: CommitPolicy::OnRead, ..Default::default() };
        nexts.push(poll(client, stream, PollingStrategy::next(), options).await?.messages[0].header.offset);
    }
    Ok(format!(r#""nexts": {nexts:?}"#))
}

// A poll that waits for what another connection sends meanwhile.
async fn hold(client: &IggyClient, stream: &str) -> Outcome {
    create(client, stream, 3).await?;
    let other = connected().await?;
    let name = stream.to_owned();
    let sending = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let mut messages = vec![IggyMessage::builder().payload("late".into()).build().expect("a message")];
        other.send_messages(&id(&name), &id(TOPIC), &Partitioning::partition_id(0), &mut messages).await
    });
    let options = PollOptions::wait(Duration::from_secs(20).into());
    let polled = poll(client, stream, PollingStrategy::offset(0), options).await?;
    sending.await??;
    Ok(format!(r#""held": {}"#, polled.messages.len()))
}

// The SDK's own idempotent producer.
async fn idempotent(client: &IggyClient, stream: &str) -> Outcome {
    create(client, stream, 3).await?;
    let producer = client.producer(stream, TOPIC)?.idempotent().topic_durability(Durability::Persisted).build();
    producer.init().await?;
    for number in 0..10 {
        producer.send(vec![IggyMessage::builder().payload(payload(stream, number).into()).build()?]).await?;
    }
    producer.shutdown().await;
    let found = client.get_stream(&id(stream)).await?.ok_or("no stream")?;
    Ok(format!(r#""messages": {}"#, found.messages_count))
}

// Print the messages of this member of a group of all SDKs, until the input ends.
async fn share(client: &IggyClient, stream: &str) -> Outcome {
    let options = PollOptions {
        commit: CommitPolicy::Auto(AutoCommit::default()),
        ..PollOptions::wait(Duration::from_secs(5).into())
    };
    let mut consumer = client.consumer_group("shared", stream, TOPIC)?.poll_options(options).build();
    consumer.init().await?;
    let mut input = tokio::io::stdin();
    let mut ignored = Vec::new();
    let end = input.read_to_end(&mut ignored);
    tokio::pin!(end);
    loop {
        tokio::select! {
            _ = &mut end => break,
            message = consumer.next() => if let Some(message) = message {
                let message = message?;
                println!(r#"{{"got": "{}"}}"#, std::str::from_utf8(&message.message.payload)?);
            },
        }
    }
    consumer.shutdown().await?;
    Ok(r#""over": true"#.to_owned())
}

async fn group(client: &IggyClient, stream: &str) -> Outcome {
    let options = PollOptions {
        commit: CommitPolicy::Auto(AutoCommit::default()),
        ..PollOptions::wait(Duration::from_secs(5).into())
    };
    let mut consumer = client.consumer_group("group-of-rust", stream, TOPIC)?.poll_options(options).build();
    consumer.init().await?;
    for number in 0..COUNT {
        let message = consumer.next().await.ok_or("the end")??;
        assert_eq!(message.message.header.offset, number);
    }
    consumer.shutdown().await?;
    Ok(format!(r#""consumed": {COUNT}, "stored": true"#))
}

async fn connected() -> Result<IggyClient, IggyError> {
    let address = std::env::args().nth(1).expect("an address");
    let client = IggyClient::from_connection_string(&format!("iggy://iggy:iggy@{address}"))?;
    client.connect().await?;
    Ok(client)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().collect();
    let client = connected().await?;
    for stream in &words[3..] {
        let result = match words[2].as_str() {
            "write" => write(&client, stream).await?,
            "read" => read(&client, stream).await?,
            "commit" => commit(&client, stream).await?,
            "group" => group(&client, stream).await?,
            "hold" => hold(&client, stream).await?,
            "idempotent" => idempotent(&client, stream).await?,
            "share" => share(&client, stream).await?,
            action => panic!("no action {action}"),
        };
        println!(r#"{{"stream": "{stream}", {result}}}"#);
    }
    println!("done");
    std::process::exit(0)
}

// Drives the unmodified npm client kafka 0.2: verb host port topic count prefix
var kafka = require('kafka')
var [verb, host, port, topic, count, prefix] = process.argv.slice(2)
count = Number(count)
function name(number) { return prefix + '-' + String(number).padStart(5, '0') }
if (verb === 'produce') {
	var producer = new kafka.Producer({ host: host, port: Number(port), topic: topic })
	producer.connect(function () {
		for (var at = 0; at < count; at += 100) {
			var values = []
			for (var number = at; number < at + 100; number++) values.push(name(number))
			producer.send(values)
		}
		setTimeout(function () { process.exit(0) }, 1000) // it tells nothing about what was sent
	})
} else {
	var seen = []
	var consumer = new kafka.Consumer({ host: host, port: Number(port), pollInterval: 100 })
	consumer.on('message', function (topic, message) {
		seen.push(message)
		if (seen.length === count) process.stdout.write(seen.join('\n') + '\n', function () { process.exit(0) })
	})
	consumer.on('error', function (code) { // its next fetch: it sends offsets above 65535 wrongly
		if (seen.length < count) throw new Error('error ' + code + ' after ' + seen.length)
	})
	consumer.connect(function () { consumer.subscribeTopic({ name: topic, partition: 0 }) })
}

"""One broker over several processes: each serves all topics, and forwards calls to the processes that own the others.

``RoutedBroker`` has the verbs of a broker. Protocols use it and never see where a topic is (decision 0130).
"""

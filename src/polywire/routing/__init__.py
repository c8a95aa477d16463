"""Forward requests between the processes of one broker, so that a client can use any process for any topic.

``RoutedBroker`` has the methods of a broker. Protocols call it for every topic, and it forwards calls for topics of
other processes (decision 0130).
"""

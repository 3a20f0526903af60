"""What only programs of Chainer's time need: functions of the old style, drawn graphs, marks of static graphs."""

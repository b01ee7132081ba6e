CREATE TABLE machines (digest TEXT PRIMARY KEY, label TEXT NOT NULL);
CREATE TABLE prices (
    machine TEXT NOT NULL, kernel TEXT NOT NULL, samples TEXT NOT NULL,
    used_s INTEGER NOT NULL, PRIMARY KEY (machine, kernel)
);
CREATE INDEX by_use ON prices (used_s);
INSERT INTO machines VALUES ('0123', 'a CPU');
INSERT INTO prices VALUES ('0123', 'kernel', '[2.4e-05, 2.5e-05, 2.6e-05]', 1795000000);
PRAGMA application_id = 1717792866;
PRAGMA user_version = 1;

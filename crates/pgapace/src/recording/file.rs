//! The file of a recording: blocks with checksums. See [`super`] for their order.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Head, Tail};
use crate::error::{Class, Failure, Result};

/// Begins every recording. The last byte is the version of the format.
const MAGIC: &[u8; 8] = b"PGAPACE\x01";
/// Kind, length of the content, length in the file, checksum.
const BLOCK_HEAD: usize = 13;
/// A block is written as soon as it has so many bytes; one message may be larger.
const BLOCK: usize = 256 << 10;
/// No message of a server is larger than 1 GB.
const LARGEST: usize = (1 << 30) + BLOCK;

/// The kinds of blocks.
const HEAD: u8 = b'h';
const MESSAGES: u8 = b'm';
const END: u8 = b'e';

/// Writes a recording.
#[derive(Debug)]
pub(crate) struct Writer<F = File> {
    file: F,
    path: PathBuf,
    /// Where the file is until it is whole.
    partial: PathBuf,
    number: u64,
    pending: Vec<u8>,
    /// Size of the whole blocks so far.
    written: u64,
    /// A write failed, so a part of a block may lie behind them.
    torn: bool,
    /// The end of what is in these blocks, and of what is pending.
    tails: [Tail; 2],
}

/// A recording that has its name.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) size: u64,
    pub(crate) tail: Tail,
    /// Why it lacks what was pending.
    pub(crate) failure: Option<Failure>,
}

/// A file that can be cut off behind its whole blocks.
pub(crate) trait Cut: Write {
    fn cut_at(&mut self, size: u64) -> io::Result<()>;
}

impl Cut for File {
    fn cut_at(&mut self, size: u64) -> io::Result<()> {
        self.set_len(size)?;
        self.seek(SeekFrom::Start(size)).map(drop)
    }
}

impl Writer {
    /// Begins a file that must not exist. `tail`: the end without any message.
    pub(crate) fn create(path: &Path, head: &Head, tail: Tail) -> Result<Self> {
        let partial = partial_path(path);
        check_new(path)?;
        let file = open_partial(&partial)?;
        // Another process may have ended its recording in between.
        check_new(path)?;
        Self::begin(file, path, partial, head, tail)
    }

    /// Ends the file. From here on it has its name, and is durable.
    ///
    /// Messages that cannot be written are left out: what is in the file is of use without them.
    pub(crate) fn finish(mut self) -> Result<Finished> {
        let failure = self.flush_block().err();
        let [tail, _] = self.tails;
        self.json(END, &tail)?;
        let Self { file, path, partial, written, .. } = self;
        let renamed = file.sync_all().and_then(|()| std::fs::rename(&partial, &path));
        // Until its folder is written, a crash could take the file away again.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let kept = || File::open(folder.unwrap_or(Path::new(".")))?.sync_all();
        renamed.and_then(|()| kept()).map_err(|e| unwritable(&path, &e))?;
        Ok(Finished { size: written, tail, failure })
    }
}

impl<F: Cut> Writer<F> {
    fn begin(mut file: F, path: &Path, partial: PathBuf, head: &Head, tail: Tail) -> Result<Self> {
        file.write_all(MAGIC).map_err(|e| unwritable(&partial, &e))?;
        let mut writer = Self {
            file,
            path: path.to_owned(),
            partial,
            number: 0,
            pending: Vec::with_capacity(2 * BLOCK),
            written: MAGIC.len() as u64,
            torn: false,
            tails: [tail; 2],
        };
        writer.json(HEAD, head)?;
        Ok(writer)
    }

    /// Adds whole CopyData messages, headers included. `tail`: the end with them. After an error they are
    /// still pending.
    pub(crate) fn append(&mut self, messages: &[u8], tail: Tail) -> Result<()> {
        self.pending.extend_from_slice(messages);
        self.tails[1] = tail;
        if self.pending.len() < BLOCK {
            return Ok(());
        }
        self.flush_block()
    }

    fn flush_block(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let content = std::mem::take(&mut self.pending);
        let written = self.block(MESSAGES, &content);
        self.pending = content;
        written?;
        self.pending.clear();
        self.tails[0] = self.tails[1];
        Ok(())
    }

    fn json(&mut self, kind: u8, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(value)
            .map_err(|e| Failure::internal(format!("cannot write JSON: {e}")))?;
        self.block(kind, &text)
    }

    fn block(&mut self, kind: u8, content: &[u8]) -> Result<()> {
        let written = self.write_whole(kind, content);
        self.written += written.map_err(|e| unwritable(&self.partial, &e))?;
        self.number += 1;
        Ok(())
    }

    /// Writes a block, and none of it if that fails. Returns its size.
    fn write_whole(&mut self, kind: u8, content: &[u8]) -> io::Result<u64> {
        let block = block(kind, self.number, content)?;
        self.cut()?;
        let written = self.file.write_all(&block);
        self.torn = written.is_err();
        // The room that it takes may be what the end of the file needs.
        written.or_else(|error| self.cut().and(Err(error)))?;
        Ok(block.len() as u64)
    }

    /// Removes what a write that failed has left.
    fn cut(&mut self) -> io::Result<()> {
        if self.torn {
            self.file.cut_at(self.written)?;
            self.torn = false;
        }
        Ok(())
    }
}

fn check_new(path: &Path) -> Result<()> {
    if path.exists() {
        let exists = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(unwritable(path, &exists).hint("Remove it, or name another file."));
    }
    Ok(())
}

/// The name of a recording until it is complete.
fn partial_path(path: &Path) -> PathBuf {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    PathBuf::from(partial)
}

/// Opens the file of a recording that is not whole. A lock tells one that is being written from one that a killed
/// process has left; the latter is overwritten.
fn open_partial(partial: &Path) -> Result<File> {
    let file =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(partial);
    let file = file.map_err(|e| unwritable(partial, &e))?;
    let metadata = file.metadata().map_err(|e| unwritable(partial, &e))?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        let message = format!("{} belongs to another user", partial.display());
        return Err(
            Failure::new(Class::Recording, message).hint("Remove it, or name another file.")
        );
    }
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message = format!("another process writes recording {}", partial.display());
            return Err(Failure::new(Class::Recording, message)
                .hint("Wait until it has ended, or name another file."));
        }
        // A file system without locks.
        Err(TryLockError::Error(error)) => tracing::debug!(%error, "cannot lock a file"),
    }
    // The process that had it may have renamed it before the lock was taken.
    let named = std::fs::metadata(partial).and_then(|named| Ok((named, file.metadata()?)));
    if !named.is_ok_and(|(named, ours)| (named.dev(), named.ino()) == (ours.dev(), ours.ino())) {
        let exists = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(unwritable(partial, &exists).hint("Name another file."));
    }
    // It will have rows of the publisher, which others may not read. A device is not the recording's own.
    let closed = match metadata.is_file() && metadata.mode() & 0o077 != 0 {
        true => file.set_permissions(Permissions::from_mode(0o600)),
        false => Ok(()),
    };
    closed.and_then(|()| file.set_len(0)).map_err(|e| unwritable(partial, &e))?;
    Ok(file)
}

/// A block as it is in the file.
fn block(kind: u8, number: u64, content: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content)?;
    let stored = encoder.finish()?;
    let lengths = [content.len(), stored.len()].map(u32::try_from);
    let [Ok(length), Ok(stored_length)] = lengths else {
        return Err(io::Error::other("a message is larger than a block can be"));
    };
    let mut block = Vec::with_capacity(BLOCK_HEAD + stored.len());
    block.push(kind);
    block.extend_from_slice(&length.to_le_bytes());
    block.extend_from_slice(&stored_length.to_le_bytes());
    block.extend_from_slice(&checksum(kind, number, length, &stored).to_le_bytes());
    block.extend_from_slice(&stored);
    Ok(block)
}

fn checksum(kind: u8, number: u64, length: u32, stored: &[u8]) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&[kind]);
    checksum.update(&number.to_le_bytes());
    checksum.update(&length.to_le_bytes());
    checksum.update(stored);
    checksum.finalize()
}

/// The error of a file that cannot be written.
fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Class::Recording, format!("cannot write recording {}: {error}", path.display()))
}

/// A recording that was found to be whole.
#[derive(Debug, Clone)]
pub(crate) struct Recording {
    pub(crate) path: PathBuf,
    pub(crate) head: Head,
    pub(crate) tail: Tail,
}

impl Recording {
    /// Opens a recording, and reads all of it once: nothing is done with a file that is damaged.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut reader = Reader::begin(path)?;
        let head = reader.head()?;
        let tail = loop {
            if let Content::End(tail) = reader.next()? {
                break tail;
            }
        };
        if reader.whole < tail.whole {
            return Err(reader.damaged("it ends before its last transaction"));
        }
        Ok(Self { path: path.to_owned(), head, tail })
    }

    /// The messages from the first on.
    pub(crate) fn messages(&self) -> Result<Messages> {
        let mut reader = Reader::begin(&self.path)?;
        if reader.head()? != self.head {
            return Err(reader.damaged("another file has taken its place"));
        }
        Ok(Messages { reader, left: self.tail.whole })
    }
}

/// Reads the messages of a recording up to its last whole transaction.
#[derive(Debug)]
pub(crate) struct Messages {
    reader: Reader,
    left: u64,
}

impl Messages {
    /// The next whole CopyData messages; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>> {
        if self.left == 0 {
            return Ok(None);
        }
        match self.reader.next()? {
            Content::Messages(mut bytes) => {
                if let Ok(left) = usize::try_from(self.left) {
                    bytes.truncate(left);
                }
                self.left -= bytes.len() as u64;
                Ok(Some(bytes))
            }
            Content::End(_) => Err(self.reader.damaged("it ends before its last transaction")),
        }
    }
}

/// The content of a block.
enum Content {
    Messages(Bytes),
    End(Tail),
}

#[derive(Debug)]
struct Reader {
    file: BufReader<File>,
    path: PathBuf,
    number: u64,
    /// Bytes of messages so far.
    whole: u64,
}

impl Reader {
    fn begin(path: &Path) -> Result<Self> {
        let unreadable = |e: &io::Error| {
            let message = format!("cannot read recording {}: {e}", path.display());
            let failure = Failure::new(Class::Recording, message);
            let partial = partial_path(path);
            match e.kind() == io::ErrorKind::NotFound && partial.exists() {
                true => failure.hint(format!(
                    "{} is there: pgapace record is still writing it, or was killed. It gives the recording its name \
                     when it ends.",
                    partial.display()
                )),
                false => failure,
            }
        };
        let file = File::open(path).map_err(|e| unreadable(&e))?;
        let file = BufReader::with_capacity(1 << 20, file);
        let mut reader = Self { file, path: path.to_owned(), number: 0, whole: 0 };
        let mut magic = [0; MAGIC.len()];
        match reader.file.read_exact(&mut magic) {
            Ok(()) if magic == *MAGIC => Ok(reader),
            Ok(()) if magic[..7] == MAGIC[..7] => Err(Failure::new(
                Class::Recording,
                format!("{} was recorded by another version of pgapace", path.display()),
            )
            .hint("Record again with this version.")),
            _ => Err(Failure::new(
                Class::Recording,
                format!("{} is not a recording of pgapace", path.display()),
            )
            .hint("pgapace record makes recordings.")),
        }
    }

    fn head(&mut self) -> Result<Head> {
        let (kind, content) = self.block()?;
        if kind != HEAD {
            return Err(self.damaged("it does not begin with its head"));
        }
        self.json(&content)
    }

    fn next(&mut self) -> Result<Content> {
        let (kind, content) = self.block()?;
        match kind {
            MESSAGES => {
                self.whole += content.len() as u64;
                Ok(Content::Messages(content.into()))
            }
            END => self.json(&content).map(Content::End),
            _ => Err(self.damaged("it has a block of an unknown kind")),
        }
    }

    fn json<T: DeserializeOwned>(&self, content: &[u8]) -> Result<T> {
        serde_json::from_slice(content).map_err(|e| self.damaged(&e.to_string()))
    }

    /// Reads and checks the next block.
    fn block(&mut self) -> Result<(u8, Vec<u8>)> {
        let mut head = [0; BLOCK_HEAD];
        self.fill(&mut head)?;
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&head[at..at + 4]);
            u32::from_le_bytes(word)
        };
        let (kind, length, stored_length) = (head[0], word(1), word(5));
        if length as usize > LARGEST || stored_length as usize > LARGEST {
            return Err(self.damaged("the length of a block is wrong"));
        }
        let mut stored = vec![0; stored_length as usize];
        self.fill(&mut stored)?;
        if checksum(kind, self.number, length, &stored) != word(9) {
            return Err(self.damaged("the checksum of a block is wrong"));
        }
        self.number += 1;
        let mut content = Vec::with_capacity(length as usize);
        let read = DeflateDecoder::new(&stored[..]).take(u64::from(length) + 1);
        let whole = { read }.read_to_end(&mut content);
        if whole.is_err() || content.len() != length as usize {
            return Err(self.damaged("a block cannot be decompressed"));
        }
        Ok((kind, content))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Failure::new(
                Class::Recording,
                format!("recording {} is truncated: its end is missing", self.path.display()),
            )
            .hint("It was copied in part, or its disk was full. Copy it again, or record again."),
            _ => Failure::new(
                Class::Recording,
                format!("cannot read recording {}: {error}", self.path.display()),
            ),
        })
    }

    fn damaged(&self, what: &str) -> Failure {
        Failure::new(
            Class::Recording,
            format!(
                "recording {} is damaged at block {}: {what}",
                self.path.display(),
                self.number
            ),
        )
        .hint("Copy it again from where it was recorded, or record again.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{PublisherFacts, StreamFacts};

    fn head() -> Head {
        Head {
            pgapace: "0".to_owned(),
            recorded_at: 1,
            publisher: PublisherFacts {
                system_identifier: "7".to_owned(),
                timeline: 1,
                version: 18,
                server_encoding: "UTF8".to_owned(),
                client_encoding: "UTF8".to_owned(),
            },
            publications: vec!["pub".to_owned()],
            start: 16,
            options: StreamFacts { binary: false, streaming: "off".to_owned(), origin_none: false },
            tables: Vec::new(),
        }
    }

    /// Three blocks of messages, of which the last is cut off in the middle.
    fn recorded(directory: &Path) -> (PathBuf, Vec<u8>) {
        let path = directory.join("recording");
        let messages: Vec<u8> = (0..=250).cycle().take(3 * BLOCK).collect();
        let mut writer = Writer::create(&path, &head(), Tail::default()).unwrap();
        let whole = messages.len() as u64 - 100;
        let tail = Tail { whole, end: 99, ..Tail::default() };
        messages.chunks(BLOCK).for_each(|chunk| writer.append(chunk, tail).unwrap());
        let Finished { size, failure, .. } = writer.finish().unwrap();
        assert!(failure.is_none());
        assert_eq!(size, std::fs::metadata(&path).unwrap().len());
        (path, messages)
    }

    #[test]
    fn a_recording_is_read_up_to_its_last_whole_transaction() {
        let directory = tempfile::tempdir().unwrap();
        let (path, messages) = recorded(directory.path());
        let recording = Recording::open(&path).unwrap();
        assert_eq!((&recording.head, recording.tail.end), (&head(), 99));
        let mut stream = recording.messages().unwrap();
        let mut read = Vec::new();
        while let Some(bytes) = stream.next().unwrap() {
            read.extend_from_slice(&bytes);
        }
        assert_eq!(read, messages[..messages.len() - 100]);
        let failure = Writer::create(&path, &head(), Tail::default()).unwrap_err();
        assert_eq!(failure.class, Class::Recording);
    }

    /// A disk with room for so many bytes.
    #[derive(Debug, Default)]
    struct SmallDisk {
        bytes: Vec<u8>,
        room: usize,
    }

    impl Write for SmallDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let fits = bytes.len().min(self.room - self.bytes.len());
            if fits == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.bytes.extend_from_slice(&bytes[..fits]);
            Ok(fits)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Cut for SmallDisk {
        fn cut_at(&mut self, size: u64) -> io::Result<()> {
            self.bytes.truncate(usize::try_from(size).unwrap());
            Ok(())
        }
    }

    /// Noise, which cannot be compressed.
    fn noise() -> Vec<u8> {
        let mut state = 1_u64;
        let step = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        };
        std::iter::repeat_with(step).take(BLOCK).collect()
    }

    #[test]
    fn a_recording_on_a_full_disk_has_what_was_written_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("recording");
        let tail =
            |number: u64| Tail { whole: number * BLOCK as u64, end: number, ..Tail::default() };
        let messages = noise();
        let stored = block(MESSAGES, 1, &messages).unwrap().len();
        // The second block fits in part, or hardly not.
        for (room, more) in [(stored + 5000, false), (2 * stored, false), (stored + 5000, true)] {
            let disk = SmallDisk { room, ..SmallDisk::default() };
            let partial = path.with_extension("partial");
            let mut writer = Writer::begin(disk, &path, partial, &head(), tail(0)).unwrap();
            writer.append(&messages, tail(1)).unwrap();
            assert_eq!(writer.append(&messages, tail(2)).unwrap_err().class, Class::Recording);
            if more {
                // Somebody has removed other files.
                writer.file.room = 10 * stored;
            }
            assert_eq!(writer.flush_block().is_ok(), more);
            let [end, _] = writer.tails;
            writer.json(END, &end).unwrap();
            std::fs::write(&path, &writer.file.bytes).unwrap();
            assert_eq!(writer.written, writer.file.bytes.len() as u64);
            let recording = Recording::open(&path).unwrap();
            assert_eq!(recording.tail, tail(if more { 2 } else { 1 }), "{room}");
            let mut stream = recording.messages().unwrap();
            assert_eq!(stream.next().unwrap().as_deref(), Some(&messages[..]));
        }
    }

    #[test]
    fn two_recordings_into_one_file_exclude_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("recording");
        // A process that was killed left the file without a lock: it is taken over.
        std::fs::write(directory.path().join("recording.partial"), [b'x'; 10_000]).unwrap();
        let mut first = Writer::create(&path, &head(), Tail::default()).unwrap();
        let tail = Tail { whole: 5, ..Tail::default() };
        first.append(b"first", tail).unwrap();
        let second = Writer::create(&path, &head(), Tail::default()).unwrap_err();
        assert_eq!(second.class, Class::Recording);
        assert!(second.message.contains("another process writes"), "{second}");
        let size = first.finish().unwrap().size;
        assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
        assert_eq!(Recording::open(&path).unwrap().tail, tail);
    }

    #[test]
    fn a_file_that_is_cut_off_anywhere_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (path, _) = recorded(directory.path());
        let bytes = std::fs::read(&path).unwrap();
        for length in (0..bytes.len()).step_by(bytes.len() / 97 + 1).chain([bytes.len() - 1]) {
            std::fs::write(&path, &bytes[..length]).unwrap();
            let failure = Recording::open(&path).unwrap_err();
            assert_eq!(failure.class, Class::Recording, "{length}");
            let expected = if length < MAGIC.len() { "is not a recording" } else { "is truncated" };
            assert!(failure.message.contains(expected), "{length}: {failure}");
        }
    }

    #[test]
    fn a_bit_that_changes_anywhere_and_blocks_that_change_places_are_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, _) = recorded(directory.path());
        let bytes = std::fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(bytes.len() / 97 + 1) {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            std::fs::write(&path, &changed).unwrap();
            assert_eq!(Recording::open(&path).unwrap_err().class, Class::Recording, "{at}");
        }
        let mut file = Vec::new();
        file.extend_from_slice(MAGIC);
        let head = serde_json::to_vec(&head()).unwrap();
        let end = serde_json::to_vec(&Tail::default()).unwrap();
        for (number, (kind, content)) in
            [(HEAD, &head[..]), (MESSAGES, b"b"), (MESSAGES, b"a"), (END, &end)].iter().enumerate()
        {
            let number = [0, 2, 1, 3][number];
            file.extend_from_slice(&block(*kind, number, content).unwrap());
        }
        std::fs::write(&path, &file).unwrap();
        assert!(Recording::open(&path).unwrap_err().message.contains("checksum"));
    }
}

//! Memory for large values.
//!
//! A process may have a limit of its memory (`ulimit -v`, `vm.overcommit_memory = 2`). Where memory is
//! refused, an ordinary allocation aborts the process, and all subscriptions in it. A buffer whose size comes
//! from a message is therefore reserved first, so that only the session fails. Small buffers are not: a
//! process without that little memory cannot go on anyway.

use bytes::{Bytes, BytesMut};

use crate::error::{Error, Result};

/// A buffer from this size on, in bytes, is reserved first.
const LARGE: usize = 16 << 20;
/// Memory that must be left then, in bytes, for the small buffers of all threads.
const SPARE: usize = 16 << 20;

/// A buffer of zeros.
///
/// # Errors
/// [`Error::OutOfMemory`] if the buffer is large, and the system refuses the memory.
pub fn zeroed(size: usize) -> Result<Vec<u8>> {
    if size < LARGE {
        return Ok(vec![0; size]);
    }
    let mut buffer = reserved(size)?;
    buffer.resize(size, 0);
    Ok(buffer)
}

/// The same, in the form of a receive buffer.
pub(crate) fn zeroed_bytes(size: usize) -> Result<BytesMut> {
    if size < LARGE {
        return Ok(BytesMut::zeroed(size));
    }
    // Neither conversion copies.
    Ok(BytesMut::from(Bytes::from(zeroed(size)?)))
}

/// Makes room for this many more bytes.
#[inline]
pub(crate) fn reserve(buffer: &mut BytesMut, additional: usize) -> Result<()> {
    if buffer.capacity() - buffer.len() >= additional {
        return Ok(());
    }
    grow(buffer, additional)
}

#[cold]
fn grow(buffer: &mut BytesMut, additional: usize) -> Result<()> {
    let bytes = buffer.len() + additional;
    if bytes < LARGE / 2 {
        // A buffer that grows may double.
        buffer.reserve(additional);
        return Ok(());
    }
    // No conversion copies. The allocator may grow the memory in its place.
    let mut larger = Vec::from(std::mem::take(buffer));
    let mut has_room = larger.try_reserve(additional).is_ok() && is_left();
    if !has_room {
        // Without the room to grow further.
        larger.shrink_to(bytes);
        has_room = larger.try_reserve_exact(additional).is_ok() && is_left();
    }
    *buffer = BytesMut::from(Bytes::from(larger));
    if has_room { Ok(()) } else { Err(Error::OutOfMemory { bytes }) }
}

fn reserved(size: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    let has_room = buffer.try_reserve_exact(size).is_ok() && is_left();
    if has_room { Ok(buffer) } else { Err(Error::OutOfMemory { bytes: size }) }
}

/// Whether the system does not refuse [`SPARE`].
fn is_left() -> bool {
    let mut spare = Vec::<u8>::new();
    let is_left = spare.try_reserve_exact(SPARE).is_ok();
    // The compiler may leave out memory that nothing uses.
    std::hint::black_box(&mut spare);
    is_left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_refused_is_an_error() {
        let most = isize::MAX.cast_unsigned();
        let refused = zeroed(most);
        assert!(matches!(refused, Err(Error::OutOfMemory { bytes }) if bytes == most));
        assert!(matches!(zeroed_bytes(most), Err(Error::OutOfMemory { .. })));
        let mut buffer = BytesMut::from(&b"kept"[..]);
        assert!(matches!(reserve(&mut buffer, most - 4), Err(Error::OutOfMemory { .. })));
        assert_eq!(buffer, &b"kept"[..]);
    }

    #[test]
    fn buffers_of_any_size_have_the_room_they_need() {
        for size in [0, 1000, LARGE / 2, LARGE, 2 * LARGE] {
            assert_eq!(zeroed(size).unwrap().len(), size);
            assert!(zeroed_bytes(size).unwrap().iter().all(|byte| *byte == 0));
            let mut buffer = BytesMut::from(&b"kept"[..]);
            reserve(&mut buffer, size).unwrap();
            let (place, capacity) = (buffer.as_ptr(), buffer.capacity());
            assert!(capacity >= size + 4);
            buffer.resize(size + 4, 0);
            assert_eq!((buffer.as_ptr(), buffer.capacity()), (place, capacity));
            assert_eq!(&buffer[..4], b"kept");
        }
    }
}

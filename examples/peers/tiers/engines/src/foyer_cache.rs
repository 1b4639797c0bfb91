//! The hybrid cache of foyer: a quarter of the data fits into its memory, the rest is on the disk.

use std::path::{Path, PathBuf};

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy,
};

use crate::{Answer, Engine};

pub struct Foyer {
    runtime: tokio::runtime::Runtime,
    folder: PathBuf,
    cache: Option<HybridCache<u64, Vec<u8>>>,
}

impl Foyer {
    pub fn new(folder: &Path) -> Answer<Foyer> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        Ok(Foyer { runtime, folder: folder.to_owned(), cache: None })
    }

    fn cache(&self) -> Answer<&HybridCache<u64, Vec<u8>>> {
        self.cache.as_ref().ok_or_else(|| "nothing was put".into())
    }

    fn close(&mut self) -> Answer<()> {
        if let Some(cache) = self.cache.take() {
            self.runtime.block_on(cache.close())?;
        }
        if self.folder.exists() {
            std::fs::remove_dir_all(&self.folder)?;
        }
        Ok(())
    }
}

impl Engine for Foyer {
    fn clear(&mut self, bytes: usize) -> Answer<()> {
        self.close()?;
        std::fs::create_dir_all(&self.folder)?;
        let folder = self.folder.clone();
        let cache = self.runtime.block_on(async move {
            let capacity = (2 * bytes).max(256 << 20);
            let device = FsDeviceBuilder::new(folder).with_capacity(capacity).build()?;
            let engine = BlockEngineConfig::new(device)
                .with_block_size(16 << 20)
                .with_buffer_pool_size(256 << 20);
            HybridCacheBuilder::new()
                .with_policy(HybridCachePolicy::WriteOnInsertion)
                .memory((bytes / 4).max(8 << 20))
                .with_weighter(|_: &u64, block: &Vec<u8>| block.len())
                .storage()
                .with_engine_config(engine)
                .build()
                .await
        })?;
        self.cache = Some(cache);
        Ok(())
    }

    fn put(&mut self, number: usize, block: &[u8]) -> Answer<()> {
        let _inside = self.runtime.enter();
        self.cache()?.insert(number as u64, block.to_vec());
        Ok(())
    }

    fn flush(&mut self) -> Answer<()> {
        self.runtime.block_on(self.cache()?.storage().wait());
        Ok(())
    }

    fn get(&mut self, number: usize, into: &mut [u8]) -> Answer<bool> {
        let cache = self.cache()?;
        let found = self.runtime.block_on(async { cache.get(&(number as u64)).await })?;
        let Some(found) = found.filter(|found| found.value().len() == into.len()) else {
            return Ok(false);
        };
        into.copy_from_slice(found.value());
        Ok(true)
    }
}

impl Drop for Foyer {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            eprintln!("foyer: {error}");
        }
    }
}

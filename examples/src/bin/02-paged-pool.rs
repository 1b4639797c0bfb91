//! One idea: one enumeration of the cache gives pools, pages and rows, and a page has one owner at a time.
//!
//! A small DeepSeek-V4 cache of three layers: reserve slots for a request, write and read rows through the
//! lease, run out of pages, give them back, and see them come with a new generation.

use std::error::Error;
use std::sync::Arc;

use kvgate_kvcache::{
    CacheSchema, Component, Formats, LayerId, MemoryKind, PoolConfig, PoolSet, Room, Space,
    V4Geometry,
};
use kvgate_transfer::Deadline;

fn main() -> Result<(), Box<dyn Error>> {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 4, 128],
        ..V4Geometry::flash()
    };
    let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &Formats::default())?);
    for row in schema.rows() {
        println!(
            "layer {} {:<11} {:>5} bytes a row, {:>2} rows a page, {:>6} bytes a page",
            row.layer,
            row.component.id(),
            row.row_bytes,
            row.rows_per_page,
            row.stride_bytes,
        );
    }

    let config = PoolConfig {
        pages: 4,
        windows: 4,
        requests: 2,
        memory: MemoryKind::Host,
    };
    let pools = PoolSet::new(Arc::clone(&schema), config)?;
    println!("pools of {} bytes", pools.memory_bytes());

    // 600 tokens are three logical pages and a ring of two window slots; all components or none.
    let mut lease = pools.reserve(600, Room(1))?;
    println!("request 1 owns pages {:?}", lease.block_table().pages());
    let first_page = lease
        .block_table()
        .pages()
        .first()
        .copied()
        .ok_or("no page")?;

    // Compressed entry 70 of ratio 4 stands for tokens 280 to 283 and lies in the second page.
    let layer = LayerId(1);
    let view = lease.layer_mut(layer)?;
    let mut latents = view
        .component(Component::C4Latent)
        .ok_or("layer 1 has ratio 4")?;
    let image: Vec<u8> = (0..latents.row_image_bytes())
        .map(|byte| byte as u8)
        .collect();
    latents.write_row(70, &image)?;
    let mut read = vec![0; image.len()];
    latents.read_row(70, &mut read);
    assert_eq!(read, image);
    println!("row 70 lies in physical page {:?}", latents.table().get(1));
    let written = lease.commit_layer(layer, 0..600)?;
    println!(
        "layer {} is written for tokens {:?}",
        written.layer(),
        written.tokens()
    );
    drop(written);

    // Two more pages are not there, so nothing is taken.
    let refused = pools
        .reserve(512, Room(2))
        .err()
        .ok_or("there should be no room")?;
    assert!(refused.is_retryable());
    println!("request 2: {refused}");
    let free_pages = pools.stats().pages.free;
    assert_eq!(free_pages, 1);

    // Nobody else reads these pages, so they come back at once, with the next generation.
    lease
        .close()
        .wait(Deadline::after_ms(1_000))
        .map_err(|_| "somebody still reads the pages")?;
    let again = pools.reserve(600, Room(3))?;
    let reused = again
        .block_table()
        .slots_of(Space::Page)
        .iter()
        .find(|id| id.index == first_page.index);
    let reused = reused.ok_or("the page was not reused")?;
    println!(
        "page {} had generation {}, now {}",
        reused.index, first_page.generation, reused.generation
    );
    assert_eq!(reused.generation, first_page.generation + 1);
    assert!(pools.stats().is_conserved());
    Ok(())
}
